"""Execute the notebooks: from each NAME.py its NAME.ipynb, whole, or an error. `make notebooks` runs this."""

import argparse
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from experiments.files import write_whole

FOLDER = Path(__file__).parent
LARGEST = 300_000
"""Bytes of an .ipynb: what a clone should carry, and a diff should show."""
# A warning that reaches stderr fails its cell; these would not, since Python hides deprecations in modules.
_STRICT = "import warnings; warnings.filterwarnings('error', module='spectral|manifold_muon|sel_jax')"


def executed(source: Path) -> NotebookNode:
    """The notebook of a .py file in the percent format, with its outputs.

    Args:
      source: the file; it is run in its folder, by this Python.

    Returns:
      The notebook, whose cells are numbered from 0, so that ids do not change from run to run.

    Raises:
      CellExecutionError: a cell raised.
      RuntimeError: a cell wrote to stderr, as warnings do.
    """
    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=[f"--IPKernelApp.exec_lines={_STRICT}"],
        resources={"metadata": {"path": str(source.parent)}},
    )
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise RuntimeError(f"{source.name}, cell {number}: stderr has\n{output.text}")
    # The kernel's own version of Python, and so no difference between two machines.
    notebook.metadata.pop("language_info", None)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks, without .py; all if not given")
    names = parser.parse_args().names
    sources = [path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)]
    if unknown := set(names) - {path.stem for path in sources}:
        parser.error(
            f"no notebook {', '.join(sorted(unknown))}: there are {', '.join(p.stem for p in sources)}"
        )
    # A GPU's or TPU's rounding would give other digits.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for source in sources:
        if names and source.stem not in names:
            continue
        start = time.monotonic()
        content = nbformat.writes(executed(source)) + "\n"
        if len(content) > LARGEST:
            sys.exit(f"{source.stem}: {len(content)} bytes are more than {LARGEST}: draw less, or smaller")
        write_whole(source.with_suffix(".ipynb"), content)
        print(f"{source.stem}: {time.monotonic() - start:.0f} s, {len(content) // 1000} kB")


if __name__ == "__main__":
    main()
