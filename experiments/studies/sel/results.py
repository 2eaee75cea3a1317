"""What an SEL study's stored runs say: each method at its best rate, steps to a matched loss, the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.config import MATRICES
from experiments.probes import QUANTILES
from experiments.reporting.panels import Curve
from experiments.reporting.records import RunRecord, ends, loss_of, losses_of, mean, read_runs
from experiments.studies.sel.overhead import read_overhead
from experiments.studies.sel.plan import (
    ABLATIONS,
    BASELINE,
    METHODS,
    SEL,
    Cell,
    SelStudy,
    Trial,
)
from experiments.studies.sweeps import Losses, best_rate

Runs = Mapping[Trial, RunRecord]


@dataclass(frozen=True)
class CellRow:
    """Both methods in one cell; None where runs are missing or none made all its updates."""

    cell: str
    baseline_rate: float | None
    """The best; that and the following are at the best rate."""
    baseline_loss: float | None
    """Final validation loss, mean over seeds."""
    sel_rate: float | None
    sel_loss: float | None
    difference: float | None
    """SEL's final loss minus the baseline's, mean over pairs of equal seeds."""
    step_ratios: list[float]
    """`step_ratio` of each pair of equal seeds."""
    step_ratio: float | None
    """Their mean."""
    overhead: list[float] | None
    """SEL's time of a step over the baseline's: first quartile, median, third quartile."""
    time_ratio: float | None
    """Mean ratio of steps over the median ratio of times: the baseline's time over SEL's."""


@dataclass(frozen=True)
class AblationRow:
    """One method at the ablations' cell and SEL's best rate there."""

    method: str
    rate: float
    losses: list[float]
    """Final, of each seed whose run made all its updates."""
    loss: float | None
    """Their mean."""
    difference: float | None
    """Its loss minus whole SEL's, mean over pairs of equal seeds."""
    statuses: list[str]


@dataclass(frozen=True)
class WeightRow:
    """Entries of the blocks' (effective) matrices: means over matrices, layers and seeds at the best rate."""

    cell: str
    method: str
    kurtosis: tuple[float | None, float | None]
    """At the start and at the end, as all that follows."""
    sizes: dict[str, tuple[float | None, float | None]]
    """Quantile of |W| -> its size over the standard deviation that the entries were drawn with."""


def read_study(study_dir: Path) -> tuple[SelStudy, dict[Trial, RunRecord]]:
    """A study's plan, and its runs by what they are, in the order of the tables.

    Raises:
      InputError: as `read_runs`, or `sel.json` is damaged.
    """
    study, _ = SelStudy.load(study_dir)
    runs = {_trial(run): run for run in read_runs(study_dir)}
    order = sorted(runs, key=lambda trial: (trial.cell, METHODS.index(trial.method), trial.rate, trial.seed))
    return study, {trial: runs[trial] for trial in order}


def _trial(run: RunRecord) -> Trial:
    config = run.config
    model, sel = config["model"], config["sel"]
    changed = [name for name, changes in ABLATIONS.items() if changes.items() <= sel.items()]
    method = (*changed, SEL)[0] if sel["on"] else BASELINE
    cell = Cell(model["width"], model["layers"])
    return Trial(cell, method, config["optimizer"]["learning_rate"], config["seed"])


def sweep_losses(runs: Runs, cell: Cell, method: str) -> Losses:
    """Rate -> final loss of the sweep's runs that have ended."""
    return {
        trial.rate: loss_of(run)
        for trial, run in runs.items()
        if (trial.cell, trial.method, trial.seed) == (cell, method, 0) and run.result
    }


def at_best_rate(runs: Runs, cell: Cell, method: str) -> dict[int, RunRecord]:
    """Seed -> run at the method's best rate in a cell; empty if there is none."""
    best = best_rate(sweep_losses(runs, cell, method))
    return seeds_at(runs, cell, method, best)


def seeds_at(runs: Runs, cell: Cell, method: str, rate: float | None) -> dict[int, RunRecord]:
    """Seed -> run of a method in a cell at a rate."""
    return {trial.seed: run for trial, run in runs.items() if trial[:3] == (cell, method, rate)}


def steps_to(curve: Curve, target: float) -> float | None:
    """The first step at which a validation loss is down to a target, between evaluations by a line.

    Args:
      curve: steps and losses; losses that are not finite are left out.
      target: the loss.

    Returns:
      None if it is never reached.
    """
    seen = np.isfinite(curve[1])
    steps, losses = curve[0][seen], curve[1][seen]
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    last = below[0]
    if last == 0:
        return float(steps[0])
    # The losses fall from the left to the right of these two, as np.interp wants its abscissae reversed.
    around = slice(last - 1, last + 1)
    return float(np.interp(target, losses[around][::-1], steps[around][::-1]))


def step_ratio(baseline: Curve, sel: Curve) -> float | None:
    """How many times fewer steps SEL needs to a matched validation loss.

    The steps of the baseline's run over those at which SEL is down to the baseline's final loss. Where SEL
    never is, the other way round, and below 1: the step at which the baseline is down to SEL's final loss,
    over the steps of SEL's run.

    Args:
      baseline: steps and validation losses.
      sel: the same.

    Returns:
      None if a final loss is not finite.
    """
    if not (len(baseline[1]) and len(sel[1]) and np.isfinite([baseline[1][-1], sel[1][-1]]).all()):
        return None
    reached = steps_to(sel, float(baseline[1][-1]))
    if reached is not None:
        return float(baseline[0][-1]) / reached if reached else None
    return steps_to(baseline, float(sel[1][-1])) / float(sel[0][-1])


def cell_row(runs: Runs, cell: Cell, study_dir: Path) -> CellRow:
    """What the table of cells says of one."""
    baseline, sel = (at_best_rate(runs, cell, method) for method in (BASELINE, SEL))
    ratios = []
    for seed in sorted(baseline.keys() & sel.keys()):
        if loss_of(baseline[seed]) is not None and loss_of(sel[seed]) is not None:
            ratios.append(step_ratio(baseline[seed].losses("eval"), sel[seed].losses("eval")))
    ratios = [ratio for ratio in ratios if ratio is not None]
    measured, ratio = read_overhead(study_dir / f"overhead-{cell}.json"), mean(ratios)
    return CellRow(
        cell=str(cell),
        baseline_rate=best_rate(sweep_losses(runs, cell, BASELINE)),
        baseline_loss=mean(losses_of(baseline.values())),
        sel_rate=best_rate(sweep_losses(runs, cell, SEL)),
        sel_loss=mean(losses_of(sel.values())),
        difference=_difference(sel, baseline),
        step_ratios=ratios,
        step_ratio=ratio,
        overhead=measured.ratio if measured else None,
        time_ratio=ratio / measured.ratio[1] if ratio and measured else None,
    )


def ablation_rows(runs: Runs, study: SelStudy) -> list[AblationRow]:
    """SEL whole and its ablations, at the rate that is SEL's best."""
    cell = Cell(*study.ablation)
    rate = best_rate(sweep_losses(runs, cell, SEL))
    whole, rows = seeds_at(runs, cell, SEL, rate), []
    for method in (SEL, *ABLATIONS):
        found = seeds_at(runs, cell, method, rate)
        if found:
            losses = losses_of(found.values())
            rows.append(
                AblationRow(
                    method=method,
                    rate=rate,
                    losses=losses,
                    loss=mean(losses),
                    difference=_difference(found, whole),
                    statuses=[run.status for run in found.values()],
                )
            )
    return rows


def weight_rows(runs: Runs, study: SelStudy) -> list[WeightRow]:
    """How the weights are distributed in every cell under both methods."""
    return [
        WeightRow(
            cell=str(cell),
            method=method,
            kurtosis=_ends(found, "kurtosis"),
            sizes={f"{q:g}": _ends(found, f"size_{q:g}") for q in QUANTILES},
        )
        for cell in study.cells
        for method in (BASELINE, SEL)
        if (found := list(at_best_rate(runs, cell, method).values()))
    ]


def _ends(runs: Sequence[RunRecord], quantity: str) -> tuple[float | None, float | None]:
    """A statistic's mean over matrices, layers and runs, at the first and at the last evaluation."""
    curves = [
        run.probe("weights", matrix, quantity, over_layers=np.mean) for run in runs for matrix in MATRICES
    ]
    return ends(curves)


def _difference(runs: Mapping[int, RunRecord], reference: Mapping[int, RunRecord]) -> float | None:
    pairs = [(loss_of(runs[seed]), loss_of(reference[seed])) for seed in runs.keys() & reference.keys()]
    return mean([loss - other for loss, other in pairs if loss is not None and other is not None])
