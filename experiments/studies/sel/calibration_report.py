"""The report of SEL's calibration, made from the stored metrics alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.config import Sel
from experiments.reporting import pages
from experiments.reporting.pages import Table, setting, text
from experiments.reporting.panels import category_panel, styles
from experiments.reporting.records import RunRecord, comparison_notes, losses_of, mean, read_runs
from experiments.studies.sel.plan import ANNEALINGS, FIXED, SelStudy

_MAY_DIFFER = (
    *(f"config.sel.{field.name}" for field in fields(Sel)),
    "config.optimizer.learning_rate",
    "config.seed",
)


@dataclass(frozen=True)
class Row:
    """The runs of a calibration that differ in nothing but the seed."""

    curvature: float
    """beta times the standard deviation of the initial weights."""
    rate: float
    annealing: str
    """A name in `plan.ANNEALINGS`."""
    statuses: list[str]
    losses: list[float]
    """Final validation losses of the runs that made all their updates."""
    loss: float | None
    """Their mean."""


_TABLE = Table(
    {
        "curvature": lambda row: f"{row.curvature:g}",
        "rate": lambda row: f"{row.rate:g}",
        "scales' rates": lambda row: row.annealing,
        "loss": lambda row: text(row.loss),
        "of the seeds": lambda row: ", ".join(map(text, row.losses)) if len(row.losses) > 1 else "–",
        "status": lambda row: ", ".join(dict.fromkeys(row.statuses)),
    },
    left=("scales' rates", "status"),
)


def read_rows(study_dir: Path) -> list[Row]:
    """What was tried in a calibration, in the order of the table.

    Raises:
      InputError: as `read_runs`.
    """
    return _rows(read_runs(study_dir))


def _rows(runs: Sequence[RunRecord]) -> list[Row]:
    tried = defaultdict(list)
    for run in runs:
        sel = run.config["sel"]
        course = next(name for name, settings in ANNEALINGS.items() if settings.items() <= sel.items())
        tried[sel["curvature"], run.config["optimizer"]["learning_rate"], course].append(run)
    rows = []
    for tuned, found in tried.items():
        losses = losses_of(found)
        rows.append(Row(*tuned, [run.status for run in found], losses, mean(losses)))
    return sorted(rows, key=lambda row: (list(ANNEALINGS).index(row.annealing), row.curvature, row.rate))


def best_row(rows: Sequence[Row]) -> Row | None:
    """The one with the lowest mean loss; None if no run has made all its updates."""
    ended = [row for row in rows if row.loss is not None]
    return min(ended, key=lambda row: row.loss, default=None)


def format_table(study_dir: Path) -> str:
    """A row for each setting, in Markdown."""
    return _TABLE.markdown(read_rows(study_dir))


def write_report(study_dir: Path) -> Path:
    """Writes report.html, results.json, results.md and the figure as PNG into the study's directory.

    Args:
      study_dir: directory with `sel.json` and one run directory for each trial; runs may be unfinished.

    Returns:
      The path of report.html, which refers to nothing outside itself.

    Raises:
      InputError: as `read_runs`, or `sel.json` is damaged.
    """
    study, _ = SelStudy.load(Path(study_dir))
    runs = read_runs(study_dir)
    rows = _rows(runs)
    best, drawn = best_row(rows), styles(f"rate {row.rate:g}" for row in rows)
    courses = "; ".join(
        f"{name}: e {each['e_first']:g} to {each['e_last']:g}, m {each['m_first']:g} to {each['m_last']:g}"
        for name, each in ANNEALINGS.items()
        if "e_first" in each
    )
    return pages.write_report(
        Path(study_dir),
        title="Calibration of SymExpLin",
        template=Path(__file__).with_name("calibration_template.html"),
        results={"setting": runs[0].facts, "rows": [asdict(row) for row in rows]},
        markdown=[_TABLE.markdown(rows)],
        words={
            **setting(runs[0].facts),
            "courses": courses,
            "seeds": study.seeds,
            "rates": ", ".join(f"{rate:g}" for rate in study.calibration_rates),
        },
        panels={"curvatures": {"curvatures": _figure(study, rows)}},
        tables={
            "table": _TABLE.html(
                rows, lambda row: drawn[f"rate {row.rate:g}"].color, bold=lambda row: row is best
            )
        },
        notes=comparison_notes(runs, _MAY_DIFFER, "SEL's settings and rate"),
    )


def _figure(study: SelStudy, rows: Sequence[Row]) -> Figure:
    losses = {
        (row.curvature, row.rate): np.nan if row.loss is None else row.loss
        for row in rows
        if row.annealing == FIXED
    }
    points = {
        f"rate {rate:g}": np.array(
            [[losses.get((curvature, rate), np.nan)] for curvature in study.curvatures]
        )
        for rate in study.calibration_rates
    }
    return category_panel(
        points,
        styles(points),
        [f"{curvature:g}" for curvature in study.curvatures],
        "Final loss over the curvature",
        "curvature: beta times the standard deviation of the initial weights",
        "nats per token",
    )
