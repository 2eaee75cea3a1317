"""The command that puts runs side by side."""

from pathlib import Path
from typing import Annotated

import tyro

from experiments.reporting.comparison import format_table, read_all, write_comparison


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path = Path("runs/comparison.html")
) -> None:
    """Put any runs on one page, whether they have ended or not: settings that differ, results, curves.

    Args:
        runs: Folders of runs, or folders that hold runs, such as a study's.
        out: The page.
    """
    found = read_all(runs)
    page = write_comparison(found, out)
    print(format_table(found))
    print(f"Page: {page}")
