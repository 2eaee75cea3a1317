"""The report of an SEL study, made from the stored metrics alone."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from experiments.config import Sel
from experiments.reporting import pages
from experiments.reporting.pages import Table, from_to, setting, text
from experiments.reporting.records import RunRecord, comparison_notes
from experiments.studies.sel.figures import STYLES, draw
from experiments.studies.sel.plan import SEL, SelStudy, Trial
from experiments.studies.sel.results import (
    AblationRow,
    CellRow,
    WeightRow,
    ablation_rows,
    cell_row,
    read_study,
    weight_rows,
)

# What a study wants to differ between its runs.
MAY_DIFFER = (
    *(f"config.model.{name}" for name in ("width", "layers", "heads")),
    *(f"config.sel.{field.name}" for field in fields(Sel)),
    "config.optimizer.learning_rate",
    "config.seed",
)


def _spread(values: Sequence[float], spec: str) -> str:
    return f"{min(values):{spec}} to {max(values):{spec}}" if len(values) > 1 else "–"


_CELLS = Table(
    {
        "model": lambda row: row.cell,
        "AdamW's loss": lambda row: text(row.baseline_loss),
        "at rate": lambda row: text(row.baseline_rate, "g"),
        "SEL's loss": lambda row: text(row.sel_loss),
        "at its rate": lambda row: text(row.sel_rate, "g"),
        "difference": lambda row: text(row.difference, "+.4f"),
        "AdamW's steps over SEL's": lambda row: text(row.step_ratio, ".3f"),
        "over seeds": lambda row: _spread(row.step_ratios, ".3f"),
        "time of a step": lambda row: text(row.overhead and row.overhead[1], ".3f"),
        "quartiles": lambda row: _spread([row.overhead[0], row.overhead[2]], ".3f") if row.overhead else "–",
        "AdamW's time over SEL's": lambda row: text(row.time_ratio, ".3f"),
    },
    left=("model",),
)
_ABLATIONS = Table(
    {
        "run": lambda row: STYLES[row.method].label,
        "loss": lambda row: text(row.loss),
        "over seeds": lambda row: _spread(row.losses, ".4f"),
        "difference to SEL": lambda row: "–" if row.method == SEL else text(row.difference, "+.4f"),
        "status": lambda row: ", ".join(dict.fromkeys(row.statuses)),
    },
    left=("run", "status"),
)
_WEIGHTS = Table(
    {
        "model": lambda row: row.cell,
        "run": lambda row: STYLES[row.method].label,
        "kurtosis": lambda row: from_to(row.kurtosis),
        "median size": lambda row: from_to(row.sizes["0.5"]),
        "0.9": lambda row: from_to(row.sizes["0.9"]),
        "0.99": lambda row: from_to(row.sizes["0.99"]),
        "0.999": lambda row: from_to(row.sizes["0.999"]),
        "largest": lambda row: from_to(row.sizes["1"]),
    },
    left=("model", "run"),
)
_TRIALS = Table(
    {
        "run": lambda row: STYLES[row[0].method].label,
        "model": lambda row: str(row[0].cell),
        "rate": lambda row: f"{row[0].rate:g}",
        "seed": lambda row: str(row[0].seed),
        "status": lambda row: row[1].status,
        "validation loss": lambda row: text(row[1].final),
        "best": lambda row: text(row[1].best),
    },
    left=("run", "model", "status"),
)


def format_table(study_dir: Path) -> str:
    """A row for each cell, in Markdown."""
    study, runs = read_study(study_dir)
    return _CELLS.markdown([cell_row(runs, cell, study_dir) for cell in study.cells])


def write_report(study_dir: Path) -> Path:
    """Writes report.html, results.json, results.md and the figures as PNG into the study's directory.

    Args:
      study_dir: directory with `sel.json` and one run directory for each trial; runs may be unfinished.

    Returns:
      The path of report.html, which refers to nothing outside itself.

    Raises:
      InputError: as `read_study`.
    """
    study_dir = Path(study_dir)
    study, runs = read_study(study_dir)
    cells = [cell_row(runs, cell, study_dir) for cell in study.cells]
    ablations, weights, records = ablation_rows(runs, study), weight_rows(runs, study), list(runs.values())
    tables = {
        "cells": (_CELLS, cells),
        "ablations": (_ABLATIONS, ablations),
        "weights": (_WEIGHTS, weights),
        "trials": (_TRIALS, list(runs.items())),
    }
    return pages.write_report(
        study_dir,
        title="SymExpLin on GPT-2",
        template=Path(__file__).with_name("template.html"),
        results={
            "setting": records[0].facts,
            "cells": [asdict(row) for row in cells],
            "ablations": [asdict(row) for row in ablations],
            "weights": [asdict(row) for row in weights],
            "trials": [_facts(trial, run) for trial, run in runs.items()],
        },
        markdown=[table.markdown(rows) for table, rows in tables.values()],
        words={**setting(records[0].facts), **_words(study)},
        panels=draw(runs, study, cells, ablations),
        tables={name: table.html(rows, _color) for name, (table, rows) in tables.items()},
        notes=comparison_notes(records, MAY_DIFFER, "model, method, rate and seed"),
    )


def _words(study: SelStudy) -> dict[str, str]:
    def listed(values: Sequence[float]) -> str:
        return ", ".join(f"{value:g}" for value in values)

    return {
        "widths": listed(study.widths),
        "depths": listed(study.depths),
        "rates": listed(study.rates),
        "extensions": str(study.extensions),
        "seeds": str(study.seeds),
        "curvature": f"{study.base.sel.curvature:g}",
        "ablation_cell": "width {}, {} layers".format(*study.ablation),
    }


def _facts(trial: Trial, run: RunRecord) -> dict[str, object]:
    return {
        "run": run.name,
        "width": trial.cell.width,
        "layers": trial.cell.layers,
        "method": trial.method,
        "rate": trial.rate,
        "seed": trial.seed,
        "status": run.status,
        "validation_loss": run.final,
        "best_validation_loss": run.best,
    }


def _color(row: CellRow | AblationRow | WeightRow | tuple[Trial, RunRecord]) -> str:
    if isinstance(row, CellRow):
        return STYLES[SEL].color
    return STYLES[row[0].method if isinstance(row, tuple) else row.method].color
