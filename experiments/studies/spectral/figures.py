"""Figures of a spectral study, by their place in its report: file name -> panel."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from experiments.config import ADAMW, SGD
from experiments.reporting.panels import Style, rate_panel, step_panel
from experiments.reporting.records import mean_curve
from experiments.studies.spectral.plan import MUON, SPECTRAL, STANDARD, Check, SpectralStudy, Sweep
from experiments.studies.spectral.results import CURVES, Runs, at_best_rate, pairs, sweep_losses
from experiments.studies.sweeps import loss_curve
from spectral import CoordinateCheck

OPTIMIZER_NAMES = {ADAMW: "AdamW", SGD: "SGD", MUON: "Muon"}
COLORS = {STANDARD: "#d55e00", SPECTRAL: "#0072b2"}
# From dark to light, in the order of the widths.
_SHADES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#b5a800", "#888888")
_MARKERS = "o^sDvP"
_AXES = {
    "norm": ("Spectral norm over its target", "||W|| over sqrt(fan_out / fan_in)"),
    "null_space": ("Inputs in the null space", "share of ||x||^2"),
    "alignment": ("Alignment of inputs", "||W x|| over ||W|| ||x||"),
}


def draw(
    runs: Runs, study: SpectralStudy, checks: Mapping[Check, CoordinateCheck]
) -> dict[str, dict[str, Figure]]:
    """Place in the report -> file name -> panel.

    Args:
      runs: of the study.
      study: its plan.
      checks: that have been made.
    """
    return {
        "rates": _rates(runs, study),
        "inputs": {
            f"{quantity}_{parametrization}": _inputs(quantity, parametrization, runs, study)
            for quantity in CURVES
            for parametrization in (STANDARD, SPECTRAL)
        },
        "checks": {check.name.replace("-", "_"): _check(check, made) for check, made in checks.items()},
    }


def _styles(study: SpectralStudy) -> dict[str, Style]:
    return {
        f"{width}": Style(f"width {width}", _SHADES[place % 6], _MARKERS[place % 6])
        for place, width in enumerate(study.widths)
    }


def _rates(runs: Runs, study: SpectralStudy) -> dict[str, Figure]:
    drawn = {}
    for parametrization, optimizer in pairs(study):
        losses = {
            f"{width}": sweep_losses(runs, Sweep(parametrization, optimizer, width), study.seeds)
            for width in study.widths
        }
        curves = {width: loss_curve(found) for width, found in losses.items() if found}
        # Both parametrisations on the same axes, to compare where their minima lie.
        rates = np.unique([t.rate for t in runs if t.optimizer == optimizer])
        drawn[f"rates_{parametrization}_{optimizer}"] = rate_panel(
            curves,
            _styles(study),
            f"{OPTIMIZER_NAMES[optimizer]}, {parametrization}",
            "final validation loss (nats)",
            rates=rates,
            unstable={width: np.isnan(values) for width, (_, values) in curves.items()},
            log=False,
            limits=_limits(runs, study, optimizer),
            whose=f"{OPTIMIZER_NAMES[optimizer]}'s",
        )
    return drawn


def _limits(runs: Runs, study: SpectralStudy, optimizer: str) -> tuple[float, float] | None:
    """Of both parametrisations' losses; what lies far above every best would hide where that is."""
    losses = [
        loss
        for sweep in study.sweeps
        if sweep.optimizer == optimizer
        for loss in sweep_losses(runs, sweep, study.seeds).values()
        if loss is not None
    ]
    if not losses:
        return None
    low, high = min(losses), float(np.quantile(losses, 0.9))
    margin = 0.05 * (high - low) + 1e-3
    return low - margin, high + margin


def _inputs(quantity: str, parametrization: str, runs: Runs, study: SpectralStudy) -> Figure:
    optimizer = next(iter(study.rates))
    curves = {}
    for width in study.widths:
        found = at_best_rate(runs, Sweep(parametrization, optimizer, width), study.seeds)
        if found:
            curves[f"{width}"] = mean_curve([CURVES[quantity](run) for run in found])
    title, axis = _AXES[quantity]
    return step_panel(curves, _styles(study), f"{title}, {parametrization}", axis, log=False)


def _check(check: Check, made: CoordinateCheck) -> Figure:
    figure = made.draw()
    grown = "more heads" if check.growth == "heads" else "larger heads"
    figure.suptitle(f"{OPTIMIZER_NAMES[check.optimizer]}, {check.parametrization}, {grown}")
    return figure
