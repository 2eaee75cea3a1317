"""The notebooks in the repository are those of the scripts beside them (`make notebooks` executes them)."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "run.py")


def script_cells(text: str) -> list[tuple[str, str]]:
    """Kind and source of the cells of a script in jupytext's percent format."""
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)
    cells = []
    for mark, source in zip(parts[1::2], parts[2::2], strict=True):
        if "[markdown]" in mark:
            source = "\n".join(re.sub(r"^# ?", "", line) for line in source.splitlines())
        else:
            source = re.sub(r"^# (?=%\w)", "", source, flags=re.MULTILINE)  # magics are comments in a script
        cells.append(("markdown" if "[markdown]" in mark else "code", source.strip()))
    return cells


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_the_scripts_own(script: Path) -> None:
    cells = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    found = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    assert found == script_cells(script.read_text())
    executed = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert executed == list(range(1, len(executed) + 1))


def test_there_are_notebooks() -> None:
    assert len(SCRIPTS) >= 3
