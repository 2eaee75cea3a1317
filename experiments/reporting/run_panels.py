"""Panels of whole runs, which pages share: by the name of their file, what they show and what draws it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.config import MATRICES
from experiments.reporting import figures
from experiments.reporting.panels import Curve, Curves, Styles
from experiments.reporting.records import RunRecord

_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}


class Panel(NamedTuple):
    """A figure that is still to be drawn."""

    draw: Callable[[Curves, Styles], Figure]
    curves: Curves
    """A run's name -> its curve."""

    @property
    def recorded(self) -> bool:
        """Whether there is a number in it."""
        return any(np.isfinite(values).any() for _, values in self.curves.values())


def draw(panels: Mapping[str, Panel], styles: Styles) -> dict[str, Figure]:
    """The figures."""
    return {name: panel.draw(panel.curves, styles) for name, panel in panels.items()}


def probed(
    runs: Sequence[RunRecord], *path: str, over_layers: Callable[[np.ndarray], float] = np.max
) -> Curves:
    """Each run's `RunRecord.probe`."""
    return {run.name: run.probe(*path, over_layers=over_layers) for run in runs}


def losses(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """Of validation, of its last half, and of training."""
    validation = {run.name: run.losses("eval") for run in runs}
    training = {run.name: run.losses("train") for run in runs}
    return {
        "validation_loss": Panel(figures.validation_loss, validation),
        "validation_loss_zoom": Panel(figures.validation_loss_zoom, validation),
        "training_loss": Panel(figures.training_loss, training),
    }


def losses_over_time(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """Of validation and of training, over the time that training took; runs without a speed have none."""
    longest = max((seconds[-1] for run in runs if len(seconds := _timed(run, "train")[0])), default=0)
    unit = next((name for name, size in _UNITS.items() if longest < 120 * size), "hours")
    x = f"{unit} of training"

    def curves(kind: str) -> Curves:
        timed = {run.name: _timed(run, kind) for run in runs}
        return {name: (seconds / _UNITS[unit], values) for name, (seconds, values) in timed.items()}

    return {
        "validation_loss_over_time": Panel(functools.partial(figures.validation_loss, x=x), curves("eval")),
        "training_loss_over_time": Panel(functools.partial(figures.training_loss, x=x), curves("train")),
    }


def updates(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """Learning rates and gradient norms."""
    return {
        "learning_rate": Panel(
            figures.learning_rate, {run.name: run.updates("learning_rate") for run in runs}
        ),
        "gradient_norm": Panel(
            figures.gradient_norm, {run.name: run.updates("gradient_norm") for run in runs}
        ),
    }


def largest_singular_values(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """Of every kind of matrix."""
    return {
        f"largest_singular_value_{matrix.replace('/', '_')}": Panel(
            functools.partial(figures.largest_singular_value, matrix=matrix),
            probed(runs, "weights", matrix, "sigma_max"),
        )
        for matrix in MATRICES
    }


def logits(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """The attention's largest."""
    return {"attention_logit": Panel(figures.attention_logit, probed(runs, "attention", "max_logit"))}


def solver(runs: Sequence[RunRecord]) -> dict[str, Panel]:
    """The tangent step's iterations and gaps."""
    return {
        "solver_iterations": Panel(
            figures.solver_iterations, {run.name: run.solver("iterations") for run in runs}
        ),
        "solver_gap": Panel(figures.solver_gap, {run.name: run.solver("gap") for run in runs}),
    }


def _timed(run: RunRecord, kind: str) -> Curve:
    steps, values = run.losses(kind)
    seconds = run.seconds(steps)
    known = np.isfinite(seconds)
    return seconds[known], values[known]
