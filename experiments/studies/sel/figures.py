"""Figures of an SEL study, by their place in its report: file name -> panel."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.config import MATRICES
from experiments.probes import QUANTILES
from experiments.reporting import figures
from experiments.reporting.panels import Curve, Curves, Style, category_panel, rate_panel, step_panel
from experiments.reporting.records import RunRecord, mean_curve
from experiments.studies.sel.plan import ABLATIONS, BASELINE, SEL, Cell, SelStudy
from experiments.studies.sel.results import (
    AblationRow,
    CellRow,
    Runs,
    at_best_rate,
    sweep_losses,
)
from experiments.studies.sweeps import loss_curve

STYLES = {
    BASELINE: Style("AdamW", "#000000", "o", "--"),
    SEL: Style("SEL", "#0072b2", "^"),
    **dict(
        zip(
            ABLATIONS,
            (
                Style("no linear path", "#d55e00", "v"),
                Style("congruent start", "#009e73", "D"),
                Style("fixed multipliers", "#cc79a7", "X"),
                Style("fixed scales", "#e69f00", "P"),
            ),
            strict=True,
        )
    ),
}
_SIZE_STYLES = {
    f"{method}, {end}": STYLES[method]._replace(label=f"{STYLES[method].label}, {end}", dashes=dashes)
    for method in (BASELINE, SEL)
    for end, dashes in (("start", ":"), ("end", "-"))
}


def draw(
    runs: Runs, study: SelStudy, cells: Sequence[CellRow], ablations: Sequence[AblationRow]
) -> dict[str, dict[str, Figure]]:
    """Place in the report -> file name -> panel.

    Args:
      runs: of the study.
      study: its plan.
      cells: their rows in the table.
      ablations: theirs.
    """
    best = {
        cell: {method: list(at_best_rate(runs, cell, method).values()) for method in (BASELINE, SEL)}
        for cell in study.cells
    }
    losses = {cell: _curves(found, _mean_losses) for cell, found in best.items()}
    middle = best[Cell(*study.ablation)]
    return {
        "loss": {f"loss_{cell}": _loss(cell, curves) for cell, curves in losses.items()},
        "loss_zoom": {f"loss_zoom_{cell}": _zoom(cell, curves) for cell, curves in losses.items()},
        "rates": _rates(runs, study),
        "steps": {"steps": _steps(cells)},
        "ablations": {"ablations": _ablations(ablations)},
        "kurtosis": {f"kurtosis_{_file(name)}": _kurtosis(name, middle) for name in MATRICES},
        "sizes": {f"sizes_{_file(name)}": _sizes(name, middle) for name in MATRICES},
    }


def _loss(cell: Cell, curves: Curves) -> Figure:
    return figures.validation_loss(curves, STYLES, f"Validation loss, {cell}")


def _zoom(cell: Cell, curves: Curves) -> Figure:
    return figures.validation_loss_zoom(curves, STYLES, f"Last half, {cell}")


def _curves(
    found: Mapping[str, Sequence[RunRecord]], of: Callable[[Sequence[RunRecord]], Curve]
) -> dict[str, Curve]:
    return {method: of(runs) for method, runs in found.items() if runs}


def _mean_losses(runs: Sequence[RunRecord]) -> Curve:
    return mean_curve([run.losses("eval") for run in runs])


def _rates(runs: Runs, study: SelStudy) -> dict[str, Figure]:
    losses = {
        cell: {method: sweep_losses(runs, cell, method) for method in (BASELINE, SEL)} for cell in study.cells
    }
    rates = np.unique([rate for each in losses.values() for found in each.values() for rate in found])
    drawn = {}
    for cell, methods in losses.items():
        found = {method: loss_curve(sweep) for method, sweep in methods.items() if sweep}
        drawn[f"rates_{cell}"] = rate_panel(
            found,
            STYLES,
            f"Final loss, {cell}",
            "nats per token",
            rates=rates,
            unstable={method: np.isnan(values) for method, (_, values) in found.items()},
            log=False,
            whose="AdamW's",
        )
    return drawn


def _steps(rows: Sequence[CellRow]) -> Figure:
    return category_panel(
        {SEL: _table([row.step_ratios for row in rows])},
        STYLES,
        [row.cell for row in rows],
        "Steps to a matched loss",
        "model (width, layers)",
        "AdamW's steps over SEL's",
        joined=False,
        level=("as many", 1.0),
    )


def _ablations(rows: Sequence[AblationRow]) -> Figure:
    whole = next((row.loss for row in rows if row.method == SEL), None)
    # Each method is a curve of its own, for its colour, with a value at its own place alone.
    named = {each.method: _table([row.losses if row is each else [] for row in rows]) for each in rows}
    return category_panel(
        named,
        STYLES,
        [STYLES[row.method].label for row in rows],
        "Final loss without a part",
        "",
        "nats per token",
        joined=False,
        level=None if whole is None else ("SEL whole", whole),
    )


def _kurtosis(name: str, found: Mapping[str, Sequence[RunRecord]]) -> Figure:
    def kurtosis(runs: Sequence[RunRecord]) -> Curve:
        return mean_curve([run.probe("weights", name, "kurtosis", over_layers=np.mean) for run in runs])

    title = f"Kurtosis, {name.replace('/', ' ')}"
    return step_panel(_curves(found, kurtosis), STYLES, title, "mean over layers and seeds")


def _sizes(name: str, found: Mapping[str, Sequence[RunRecord]]) -> Figure:
    points = {}
    for method, runs in found.items():
        for end, at in (("start", 0), ("end", -1)):
            sizes = [[_size(run, name, quantile, at) for run in runs] for quantile in QUANTILES]
            points[f"{method}, {end}"] = np.array([[np.mean(each) if each else np.nan] for each in sizes])
    return category_panel(
        points,
        _SIZE_STYLES,
        [f"{quantile:g}" for quantile in QUANTILES],
        f"|W|, {name.replace('/', ' ')}",
        "quantile",
        "over the initial standard deviation",
        log=True,
    )


def _size(run: RunRecord, name: str, quantile: float, at: int) -> float:
    values = run.probe("weights", name, f"size_{quantile:g}", over_layers=np.mean)[1]
    return values[at] if len(values) else np.nan


def _table(rows: Sequence[Sequence[float]]) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def _file(name: str) -> str:
    return name.replace("/", "_")
