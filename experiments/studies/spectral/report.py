"""The report of a spectral study, made from what it stored alone."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.reporting import pages
from experiments.reporting.pages import Table, from_to, setting, text
from experiments.reporting.records import comparison_notes
from experiments.studies.spectral.figures import COLORS, OPTIMIZER_NAMES, draw
from experiments.studies.spectral.results import (
    CheckRow,
    TransferRow,
    check_rows,
    input_rows,
    read_checks,
    read_study,
    sweep_rows,
    transfer_rows,
)

# What a study wants to differ between its runs.
MAY_DIFFER = (
    *(f"config.model.{name}" for name in ("width", "heads", "parametrization")),
    *(f"config.optimizer.{name}" for name in ("name", "learning_rate", "muon_learning_rate", "momentum")),
    "config.seed",
)
_MAY_DIFFER = "parametrization, width, optimizer, its momentum, rate and seed"
_WHOSE = {
    "optimizer": lambda row: OPTIMIZER_NAMES[row.optimizer],
    "parametrization": lambda row: row.parametrization,
}
_GROWTHS = {"heads": "more heads", "head_size": "larger heads"}


def _range(slopes: Sequence[float | None]) -> str:
    low, high = slopes
    return "–" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"


_TRANSFERS = Table(
    {
        **_WHOSE,
        "tuned rate": lambda row: text(row.tuned_rate, "g"),
        "best at the largest": lambda row: text(row.best_rate, "g"),
        "shift (factors of 2)": lambda row: text(row.shift, "+.0f"),
        "loss with the tuned rate": lambda row: (
            row.transferred if row.transferred_loss is None else text(row.transferred_loss)
        ),
        "with its best": lambda row: text(row.best_loss),
        "excess": lambda row: text(row.excess, ".2%"),
    },
    left=tuple(_WHOSE),
)
_CHECKS = Table(
    {
        **_WHOSE,
        "width is": lambda row: _GROWTHS[row.growth],
        "blocks' features": lambda row: _range(row.features),
        "their changes": lambda row: _range(row.changes),
        "logits": lambda row: text(row.logits, "+.2f"),
        "their change": lambda row: text(row.logit_changes, "+.2f"),
    },
    left=(*_WHOSE, "width is"),
)
_SWEEPS = Table(
    {
        **_WHOSE,
        "width": lambda row: str(row.width),
        "best rate": lambda row: text(row.best_rate, "g") + " (an end)" * row.at_an_end,
        "loss": lambda row: text(row.best_loss),
        "every rate: its seeds": lambda row: "; ".join(
            f"{rate}: {', '.join(text(loss) if loss is not None else 'diverged' for loss in losses)}"
            for rate, losses in row.losses.items()
        ),
    },
    left=(*_WHOSE, "every rate: its seeds"),
)
_INPUTS = Table(
    {
        **_WHOSE,
        "width": lambda row: str(row.width),
        "norm over target": lambda row: from_to(row.norm),
        "null space": lambda row: from_to(row.null_space),
        "alignment": lambda row: from_to(row.alignment),
    },
    left=tuple(_WHOSE),
)


def _color(row: Any) -> str:
    return COLORS[row.parametrization]


def format_table(study_dir: Path) -> str:
    """Whether rates transfer, and the slopes of the checks, in Markdown."""
    study, runs = read_study(study_dir)
    transfers, checks = transfer_rows(runs, study), check_rows(read_checks(study, study_dir))
    return f"{_TRANSFERS.markdown(transfers)}\n\n{_CHECKS.markdown(checks)}"


def write_report(study_dir: Path) -> Path:
    """Writes report.html, results.json, results.md and the figures as PNG into the study's directory.

    Args:
      study_dir: directory with `spectral.json`, the checks' files and one run directory for each trial; runs
        may be unfinished, checks missing.

    Returns:
      The path of report.html, which refers to nothing outside itself.

    Raises:
      InputError: as `read_study`.
    """
    study_dir = Path(study_dir)
    study, runs = read_study(study_dir)
    checks = read_checks(study, study_dir)
    transfers: list[TransferRow] = transfer_rows(runs, study)
    slopes: list[CheckRow] = check_rows(checks)
    tables = {
        "transfers": (_TRANSFERS, transfers),
        "checks": (_CHECKS, slopes),
        "sweeps": (_SWEEPS, sweep_rows(runs, study)),
        "inputs": (_INPUTS, input_rows(runs, study)),
    }
    records, model = list(runs.values()), study.base.model
    return pages.write_report(
        study_dir,
        title="Spectral parametrisation on GPT-2",
        template=Path(__file__).with_name("template.html"),
        results={"setting": records[0].facts}
        | {name: [asdict(row) for row in rows] for name, (_, rows) in tables.items()},
        markdown=[table.markdown(rows) for table, rows in tables.values()],
        words={
            **setting(records[0].facts),
            "widths": ", ".join(map(str, study.widths)),
            "smallest": min(study.widths),
            "largest": max(study.widths),
            "head_size": model.base_width // model.base_heads,
            "base_width": model.base_width,
            "base_heads": model.base_heads,
            "seeds": study.seeds,
            "extensions": study.extensions,
            "adam_share": f"{study.adam_share:g}",
            "check_widths": ", ".join(map(str, study.check_widths)),
            "check_steps": study.check_steps,
            "check_seeds": study.check_seeds,
            "check_rates": ", ".join(
                f"{rate:g} ({OPTIMIZER_NAMES[name]})" for name, rate in study.check_rates.items()
            ),
            "optimizers": ", ".join(OPTIMIZER_NAMES[name] for name in study.rates),
            "panels_of": OPTIMIZER_NAMES[next(iter(study.rates))],
        },
        panels=draw(runs, study, checks),
        tables={name: table.html(rows, _color) for name, (table, rows) in tables.items()},
        notes=comparison_notes(records, MAY_DIFFER, _MAY_DIFFER),
    )
