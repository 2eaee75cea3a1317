"""The report of SEL's calibration, made from the stored metrics alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.config import Sel
from experiments.files import write_json, write_whole
from experiments.reporting.pages import Table, save_images, setting, text, write_page
from experiments.reporting.panels import category_panel, styles
from experiments.reporting.records import RunRecord, comparison_notes, loss_of, read_runs
from experiments.studies.sel.plan import ANNEALINGS, DEFAULT_ANNEALING, SelStudy

_MAY_DIFFER = (*(f"config.sel.{field.name}" for field in fields(Sel)), "config.optimizer.learning_rate")


@dataclass(frozen=True)
class Row:
    """One run of a calibration."""

    factor: float
    """c of the curvature c sqrt(fan_in)."""
    rate: float
    annealing: str
    """A name in `plan.ANNEALINGS`."""
    status: str
    loss: float | None
    """Final validation loss; None if the run has not made all its updates."""


_TABLE = Table(
    {
        "factor": lambda row: f"{row.factor:g}",
        "rate": lambda row: f"{row.rate:g}",
        "scales' rates": lambda row: row.annealing,
        "loss": lambda row: text(row.loss),
        "status": lambda row: row.status,
    },
    left=("scales' rates", "status"),
)


def read_rows(study_dir: Path) -> list[Row]:
    """The runs of a calibration, in the order of the table.

    Raises:
      InputError: as `read_runs`.
    """
    return _rows(read_runs(study_dir))


def _rows(runs: Sequence[RunRecord]) -> list[Row]:
    rows = []
    for run in runs:
        sel = run.config["sel"]
        course = next(name for name, settings in ANNEALINGS.items() if settings.items() <= sel.items())
        rate = run.config["optimizer"]["learning_rate"]
        rows.append(Row(sel["width_factor"], rate, course, run.status, loss_of(run)))
    return sorted(rows, key=lambda row: (list(ANNEALINGS).index(row.annealing), row.factor, row.rate))


def best_row(rows: Sequence[Row]) -> Row | None:
    """The one with the lowest loss; None if no run has made all its updates."""
    ended = [row for row in rows if row.loss is not None]
    return min(ended, key=lambda row: row.loss, default=None)


def format_table(study_dir: Path) -> str:
    """A row for each run, in Markdown."""
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
    study_dir = Path(study_dir)
    study, _ = SelStudy.load(study_dir)
    runs = read_runs(study_dir)
    rows = _rows(runs)
    notes = comparison_notes(runs, _MAY_DIFFER, "SEL's settings and rate")
    write_json(
        study_dir / "results.json",
        {"notes": notes, "setting": runs[0].facts, "runs": [asdict(row) for row in rows]},
    )
    write_whole(study_dir / "results.md", _TABLE.markdown(rows) + "\n")
    drawn = styles(f"rate {row.rate:g}" for row in rows)
    report, best = study_dir / "report.html", best_row(rows)
    courses = "; ".join(
        f"{name}: e {each['e_first']:g} to {each['e_last']:g}, m {each['m_first']:g} to {each['m_last']:g}"
        for name, each in ANNEALINGS.items()
        if "e_first" in each
    )
    words = {
        "courses": courses,
        "default": DEFAULT_ANNEALING,
        "rates": ", ".join(f"{rate:g}" for rate in study.calibration_rates),
    }
    write_page(
        report,
        title="Calibration of SymExpLin",
        template=Path(__file__).parent / "calibration_template.html",
        words={**setting(runs[0].facts), **words},
        parts={
            "factors_panel": " ".join(save_images(study_dir, {"factors": _figure(study, rows)}).values()),
            "table": _TABLE.html(
                rows, lambda row: drawn[f"rate {row.rate:g}"].color, bold=lambda row: row is best
            ),
        },
        notes=notes,
    )
    return report


def _figure(study: SelStudy, rows: Sequence[Row]) -> Figure:
    losses = {
        (row.factor, row.rate): np.nan if row.loss is None else row.loss
        for row in rows
        if row.annealing == DEFAULT_ANNEALING
    }
    points = {
        f"rate {rate:g}": np.array([[losses.get((factor, rate), np.nan)] for factor in study.factors])
        for rate in study.calibration_rates
    }
    return category_panel(
        points,
        styles(points),
        [f"{factor:g}" for factor in study.factors],
        "Final loss over the curvature",
        "factor c of the curvature c sqrt(fan_in)",
        "nats per token",
    )
