"""The report of a stability frontier, made from the stored metrics alone."""

from dataclasses import asdict
from pathlib import Path

from experiments.reporting import pages
from experiments.reporting.pages import Table, setting, text
from experiments.reporting.panels import styles
from experiments.reporting.records import comparison_notes
from experiments.studies.frontier.figures import draw
from experiments.studies.frontier.trials import CLOSE, Sweep, Trial, read_trials, summarize

# What a frontier wants to differ between its runs.
_MAY_DIFFER = tuple(
    f"config.optimizer.{name}" for name in ("name", "solver", "dgram_retraction", "muon_learning_rate")
)


def _of(trial: Trial | None, name: str, spec: str) -> str:
    return text(None if trial is None else getattr(trial, name), spec)


_SWEEPS = Table(
    {
        "run": lambda row: row.label,
        "solver": lambda row: row.solver,
        "best loss": lambda row: _of(row.best, "validation_loss", ".4f"),
        "at rate": lambda row: _of(row.best, "rate", "g"),
        f"largest rate within {CLOSE} of it": lambda row: text(row.close, "g"),
        "largest stable rate": lambda row: _of(row.largest, "rate", "g"),
        "why no larger": lambda row: row.end,
        "there: singular value, attention": lambda row: _of(row.largest, "sigma_max_attention", ".3g"),
        "singular value, MLP": lambda row: _of(row.largest, "sigma_max_mlp", ".3g"),
        "attention logit": lambda row: _of(row.largest, "max_logit", ".3g"),
        "saturated rows": lambda row: _of(row.largest, "saturated", ".1%"),
    },
    left=("run", "solver", "why no larger"),
)
_TRIALS = Table(
    {
        "run": lambda row: row.label,
        "solver": lambda row: row.solver,
        "rate": lambda row: f"{row.rate:g}",
        "verdict": lambda row: text(row.verdict),
        "status": lambda row: row.status,
        "validation loss": lambda row: text(row.validation_loss),
        "largest singular value, attention": lambda row: text(row.sigma_max_attention, ".3g"),
        "MLP": lambda row: text(row.sigma_max_mlp, ".3g"),
        "largest attention logit": lambda row: text(row.max_logit, ".3g"),
        "saturated rows": lambda row: text(row.saturated, ".1%"),
    },
    left=("run", "solver", "verdict", "status"),
)


def format_table(study_dir: Path) -> str:
    """A row for each sweep, in Markdown."""
    _, trials, frontier = read_trials(study_dir)
    return _SWEEPS.markdown(summarize(trials, frontier))


def write_report(study_dir: Path) -> Path:
    """Writes report.html, results.json, results.md and the figures as PNG into the study's directory.

    Args:
      study_dir: directory with `frontier.json` and one run directory for each trial; runs may be unfinished.

    Returns:
      The path of report.html, which refers to nothing outside itself.

    Raises:
      InputError: as `read_trials`.
    """
    runs, trials, frontier = read_trials(study_dir)
    sweeps = summarize(trials, frontier)
    return pages.write_report(
        Path(study_dir),
        title="The stability frontier of Manifold Muon",
        template=Path(__file__).with_name("template.html"),
        results={
            "frontier": asdict(frontier),
            "setting": runs[0].facts,
            "sweeps": [asdict(row) for row in sweeps],
            "trials": [asdict(row) for row in trials],
        },
        markdown=[_SWEEPS.markdown(sweeps), _TRIALS.markdown(trials)],
        words={
            **setting(runs[0].facts),
            "margin": runs[0].config["divergence_margin"],
            "entropy": f"{frontier.unigram_entropy:.3f}",
            "start": f"{frontier.start:g}",
            "cap": f"{frontier.cap:g}",
        },
        panels=draw(trials, frontier),
        tables={"sweeps": _SWEEPS.html(sweeps, _color), "trials": _TRIALS.html(trials, _color)},
        notes=comparison_notes(runs, _MAY_DIFFER, "assignment, solver and rate"),
    )


def _color(row: Trial | Sweep) -> str:
    return styles([row.assignment])[row.assignment].color
