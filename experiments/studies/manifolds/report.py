"""The report of a study, made from the stored metrics alone: nothing is trained, loaded or measured again."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.reporting import figures, pages, panels, run_panels
from experiments.reporting.pages import Table, setting, text
from experiments.reporting.records import RunRecord, comparison_notes, finite, read_runs

# Optimizer: manifold of the attention, manifold of the MLP, and the paper's validation loss.
_PAPER: dict[str, tuple[str, str, float | str | None]] = {
    "none": ("none", "none", 3.3855),
    "stiefel": ("Stiefel", "Stiefel", 3.3679),
    "dgram": ("DGram", "DGram", "unstable"),
    "oblique": ("Oblique", "Oblique", None),
    "hetero": ("Stiefel", "DGram", 3.3544),
    "hetero-inv": ("DGram", "Stiefel", "unstable"),
}
_CAVEAT = (
    "The paper's numbers (arXiv:2606.13276) are of GPT-2 small (12 layers, width 768) on OpenWebText after "
    "50,000 steps of 64 x 1024 tokens: {scale}. They are there for the order of the runs, not for the value. "
    "Every run here is one seed, which gives no error bars: small differences can be chance."
)
# The only difference that a study of optimizers wants between its runs.
_MAY_DIFFER = ("config.optimizer.name",)


@dataclass(frozen=True)
class Row:
    """One run in the results table; None where there is no (finite) number."""

    run: str
    label: str
    attention: str | None
    mlp: str | None
    validation_loss: float | None
    best_validation_loss: float | None
    status: str
    difference: float | None
    """Final validation loss minus the unconstrained run's, where both finished."""
    paper: float | str | None
    max_logit: float | None
    """Largest attention logit over layers at the last evaluation."""
    tokens_per_second: float | None
    """Median over the run."""


def results(runs: Sequence[RunRecord]) -> list[Row]:
    """The results table, one row per run."""
    styles = panels.styles(run.name for run in runs)
    reference = next((run.final for run in runs if run.name == "none" and run.finished), None)
    rows = []
    for run in runs:
        attention, mlp, _ = _PAPER.get(run.config["optimizer"]["name"], (None, None, None))
        *_, paper = _PAPER.get(run.name, (None,))
        comparable = run.finished and run.final is not None and reference is not None
        rows.append(
            Row(
                run=run.name,
                label=styles[run.name].label,
                attention=attention,
                mlp=mlp,
                validation_loss=run.final,
                best_validation_loss=run.best,
                status=run.status,
                difference=run.final - reference if comparable else None,
                paper=paper,
                max_logit=next(iter(finite(run.probe("attention", "max_logit")[1][-1:])), None),
                tokens_per_second=float(np.median(run.speeds)) if run.speeds else None,
            )
        )
    return rows


_TABLE = Table(
    {
        "run": lambda row: row.label,
        "attention manifold": lambda row: text(row.attention),
        "MLP manifold": lambda row: text(row.mlp),
        "validation loss (final)": lambda row: text(row.validation_loss),
        "best validation loss": lambda row: text(row.best_validation_loss),
        "status": lambda row: row.status,
        "difference to unconstrained": lambda row: text(row.difference, "+.4f"),
        "paper's validation loss (GPT-2 small)": lambda row: text(row.paper),
        "largest attention logit at the end": lambda row: text(row.max_logit, ".3g"),
        "tokens/s": lambda row: text(row.tokens_per_second, ",.0f"),
    },
    left=("run", "attention manifold", "MLP manifold", "status"),
)
_TERMINAL = {
    "run": "run",
    "validation loss (final)": "val. loss",
    "best validation loss": "best",
    "difference to unconstrained": "difference",
    "paper's validation loss (GPT-2 small)": "paper",
    "largest attention logit at the end": "max logit",
    "status": "status",
}


def format_table(study_dir: Path) -> str:
    """The results as aligned plain text, at most 100 columns wide, for the terminal."""
    return _TABLE.plain(results(read_runs(study_dir)), _TERMINAL)


def _html_table(rows: Sequence[Row]) -> str:
    styles = panels.styles(row.run for row in rows)
    losses = {row.run: row.validation_loss for row in rows if row.status == "finished"}
    best = min((loss for loss in losses.values() if loss is not None), default=None)
    return _TABLE.html(
        rows,
        color=lambda row: styles[row.run].color,
        bold=lambda row: best is not None and losses.get(row.run) == best,
    )


def _draw(runs: Sequence[RunRecord]) -> dict[str, Figure]:
    """Every panel of the page, by the name of its file and its place in the template."""
    styles = panels.styles(run.name for run in runs)
    probe = functools.partial(run_panels.probed, runs)
    shared = {**run_panels.losses(runs), **run_panels.logits(runs), **run_panels.solver(runs)}
    drawn = run_panels.draw(shared, styles)
    for name, draw in (
        ("entropy", figures.softmax_entropy),
        ("saturated", figures.saturated_rows),
        ("jacobian", figures.softmax_jacobian),
    ):
        drawn[f"softmax_{name}"] = draw(probe("attention", name, over_layers=np.mean), styles)
    for part, key, matrix in (
        ("attention", "attn/c_attn", "attention c_attn"),
        ("mlp", "mlp/c_fc", "MLP c_fc"),
    ):
        largest, gram = probe("weights", key, "sigma_max"), probe("weights", key, "gram_off_diagonal")
        smallest = probe("weights", key, "sigma_min", over_layers=np.min)
        drawn[f"largest_singular_value_{part}"] = figures.largest_singular_value(largest, styles, matrix)
        drawn[f"smallest_singular_value_{part}"] = figures.smallest_singular_value(smallest, styles, matrix)
        drawn[f"gram_off_diagonal_{part}"] = figures.gram_off_diagonal(gram, styles, matrix)
    drawn["constraint_violation"] = figures.constraint_violation(
        {run.name: run.violation() for run in runs}, styles
    )
    return drawn


def write_report(study_dir: Path) -> Path:
    """Writes report.html, results.json, results.md and the figures as PNG into the study's directory.

    Args:
      study_dir: directory with one run directory per optimizer; a run may be unfinished.

    Returns:
      The path of report.html, which refers to nothing outside itself.

    Raises:
      InputError: as `read_runs`.
    """
    runs = read_runs(study_dir)
    rows, caveat = results(runs), _caveat(runs[0])
    return pages.write_report(
        Path(study_dir),
        title="Manifold Muon on GPT-2",
        template=Path(__file__).with_name("template.html"),
        results={"runs": [asdict(row) | run.facts for row, run in zip(rows, runs, strict=True)]},
        markdown=[_TABLE.markdown(rows), caveat],
        words={**setting(runs[0].facts), "caveat": caveat},
        panels={name: {name: figure} for name, figure in _draw(runs).items()},
        tables={"table": _html_table(rows)},
        notes=comparison_notes(runs, _MAY_DIFFER, "the optimizer's name"),
    )


def _caveat(run: RunRecord) -> str:
    model = run.config["model"]
    same = (model["layers"], model["width"]) == (12, 768)
    return _CAVEAT.format(scale="the same shape as here" if same else "another scale and corpus than here")
