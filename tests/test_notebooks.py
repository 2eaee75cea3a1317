"""The notebooks in the repository are those of the scripts beside them (`make notebooks` executes them)."""

from pathlib import Path

import jupytext
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "run.py")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_the_scripts_own(script: Path) -> None:
    stored, source = jupytext.read(script.with_suffix(".ipynb")), jupytext.read(script)
    found, expected = ([(cell.cell_type, cell.source) for cell in x.cells] for x in (stored, source))
    assert found == expected
    executed = [cell.execution_count for cell in stored.cells if cell.cell_type == "code"]
    assert executed == list(range(1, len(executed) + 1))


def test_there_are_notebooks() -> None:
    assert len(SCRIPTS) >= 3
