"""Figures of a stability frontier: measurements against Muon's rate, one panel a solver on a common scale."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.reporting.panels import Limits, rate_panel, styles
from experiments.studies.frontier.stability import Frontier
from experiments.studies.frontier.trials import UNCONSTRAINED, Trial

_LARGEST = "largest over the run"


class _Quantity(NamedTuple):
    title: str
    axis: str
    value: Callable[[Trial], float | None]
    log: bool = True


_QUANTITIES = {
    "validation_loss": _Quantity("Final loss", "nats per token", lambda trial: trial.validation_loss, False),
    "sigma_max_attention": _Quantity(
        "Singular value, attention", _LARGEST, lambda trial: trial.sigma_max_attention
    ),
    "sigma_max_mlp": _Quantity("Singular value, MLP", _LARGEST, lambda trial: trial.sigma_max_mlp),
    "max_logit": _Quantity("|Attention logit|", _LARGEST, lambda trial: trial.max_logit),
    "saturated": _Quantity(
        "Saturated rows", "share with a probability > 0.99", lambda trial: trial.saturated, False
    ),
}


def draw(trials: Sequence[Trial], frontier: Frontier) -> dict[str, dict[str, Figure]]:
    """Measurement -> file name -> panel; the unconstrained runs, which have one solver, are in every panel.

    Args:
      trials: in the order of the tables; those that have not ended are left out.
      frontier: their rules.
    """
    ended = [trial for trial in trials if trial.verdict is not None]
    constrained = [trial.solver for trial in ended if trial.assignment != UNCONSTRAINED]
    solvers = dict.fromkeys(constrained or [trial.solver for trial in ended])
    rates = np.unique([trial.rate for trial in ended])
    places = {}
    for name, quantity in _QUANTITIES.items():
        limits = _loss_limits(ended, frontier) if name == "validation_loss" else _limits(ended, quantity)
        level = ("unigram entropy", frontier.unigram_entropy) if name == "validation_loss" else None
        places[name] = {
            f"{name}_{solver}": _panel(_groups(ended, solver), quantity, solver, rates, limits, level)
            for solver in solvers
        }
    return places


def _groups(ended: Sequence[Trial], solver: str) -> dict[str, list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    for trial in ended:
        if trial.solver == solver or trial.assignment == UNCONSTRAINED:
            groups.setdefault(trial.assignment, []).append(trial)
    return groups


def _panel(
    groups: dict[str, list[Trial]],
    quantity: _Quantity,
    solver: str,
    rates: np.ndarray,
    limits: Limits | None,
    level: tuple[str, float] | None,
) -> Figure:
    curves = {
        name: (np.array([trial.rate for trial in group]), _values(group, quantity))
        for name, group in groups.items()
    }
    return rate_panel(
        curves,
        styles(curves),
        f"{quantity.title}: {solver}",
        quantity.axis,
        rates=rates,
        unstable={
            name: np.array([trial.verdict == "unstable" for trial in group]) for name, group in groups.items()
        },
        log=quantity.log,
        limits=limits,
        level=level,
    )


def _values(trials: Sequence[Trial], quantity: _Quantity) -> np.ndarray:
    found = [quantity.value(trial) for trial in trials]
    return np.array([np.nan if value is None else value for value in found], dtype=float)


def _loss_limits(ended: Sequence[Trial], frontier: Frontier) -> Limits:
    """From the best loss to just above the unigram entropy, beyond which no run is stable."""
    low = min((trial.validation_loss for trial in ended if trial.verdict == "stable"), default=0.0)
    pad = 0.06 * (frontier.unigram_entropy - low)
    return low - pad, frontier.unigram_entropy + 2 * pad


def _limits(ended: Sequence[Trial], quantity: _Quantity) -> Limits | None:
    """The scale that both solvers' panels share."""
    if not quantity.log:
        return -0.02, 1.02
    values = _values(ended, quantity)
    values = values[np.isfinite(values) & (values > 0)]
    return (float(values.min()) / 1.3, float(values.max()) * 1.3) if len(values) else None
