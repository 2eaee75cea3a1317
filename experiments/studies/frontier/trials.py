"""What a frontier's stored runs say: a trial for each of them, a sweep for each assignment and solver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.config import SOLVERS
from experiments.reporting import panels
from experiments.reporting.records import RunRecord, loss_of, read_runs
from experiments.studies.frontier.stability import Frontier, Verdict

UNCONSTRAINED = "none"
CLOSE = 0.1
"""Nats above a sweep's best loss that still count as close to it."""
_MODULES = {"attention": ("attn/c_attn", "attn/c_proj"), "mlp": ("mlp/c_fc", "mlp/c_proj")}


@dataclass(frozen=True)
class Trial:
    """One run: an assignment under a solver at a rate; None where there is no (finite) number."""

    assignment: str
    label: str
    solver: str
    rate: float
    status: str
    verdict: Verdict | None
    """None while the run has not ended."""
    validation_loss: float | None
    sigma_max_attention: float | None
    """Largest singular value of the attention's matrices; this and what follows: largest over the run."""
    sigma_max_mlp: float | None
    max_logit: float | None
    saturated: float | None
    """Share of softmax rows with a probability above 0.99, mean over rows and layers."""


@dataclass(frozen=True)
class Sweep:
    """An assignment under a solver, over all rates; None where no rate is stable."""

    assignment: str
    label: str
    solver: str
    largest: Trial | None
    """At the largest stable rate."""
    end: str
    """Why no larger one: how the next run ended, or that the cap was reached."""
    best: Trial | None
    """With the lowest final loss."""
    close: float | None
    """Largest stable rate with a loss close to the best."""


def read_trials(study_dir: Path) -> tuple[list[RunRecord], list[Trial], Frontier]:
    """A frontier's runs, what they say, in the order of the tables, and its rules.

    Raises:
      InputError: as `read_runs`, or `frontier.json` is damaged.
    """
    runs, frontier = read_runs(study_dir), Frontier.load(study_dir)
    losses: dict[tuple[str, str], dict[float, float | None]] = {}
    for run in runs:
        if run.result:
            assignment, solver, rate = _place(run)
            losses.setdefault((assignment, solver), {})[rate] = loss_of(run)
    verdicts = {sweep: frontier.verdicts(found) for sweep, found in losses.items()}
    trials = [_trial(run, verdicts) for run in runs]
    assignments = list(panels.styles(trial.assignment for trial in trials))

    def order(trial: Trial) -> tuple[int, int, float]:
        return SOLVERS.index(trial.solver), assignments.index(trial.assignment), trial.rate

    return runs, sorted(trials, key=order), frontier


def _place(run: RunRecord) -> tuple[str, str, float]:
    optimizer = run.config["optimizer"]
    return optimizer["name"], optimizer["solver"], optimizer["muon_learning_rate"]


def _trial(run: RunRecord, verdicts: Mapping[tuple[str, str], Mapping[float, Verdict]]) -> Trial:
    assignment, solver, rate = _place(run)

    def sigma_max(module: str) -> float | None:
        peaks = [run.peak("weights", matrix, "sigma_max") for matrix in _MODULES[module]]
        return max((peak for peak in peaks if peak is not None), default=None)

    return Trial(
        assignment=assignment,
        label=panels.styles([assignment])[assignment].label,
        solver=solver,
        rate=rate,
        status=run.status,
        verdict=verdicts[assignment, solver][rate] if run.result else None,
        validation_loss=run.final,
        sigma_max_attention=sigma_max("attention"),
        sigma_max_mlp=sigma_max("mlp"),
        max_logit=run.peak("attention", "max_logit"),
        saturated=run.peak("attention", "saturated", over_layers=np.mean),
    )


def summarize(trials: Sequence[Trial], frontier: Frontier) -> list[Sweep]:
    """One row for each assignment and solver; runs that have not ended are left out."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.verdict is not None:
            groups.setdefault((trial.assignment, trial.solver), []).append(trial)
    return [_sweep(group, frontier) for group in groups.values()]


def _sweep(group: Sequence[Trial], frontier: Frontier) -> Sweep:
    stable = [trial for trial in group if trial.verdict == "stable"]
    largest = stable[-1] if stable else None
    above = [trial for trial in group if largest is None or trial.rate > largest.rate]
    unstable = next((trial for trial in above if trial.verdict == "unstable"), None)
    if unstable is not None:
        why = "above the unigram entropy" if unstable.status == "finished" else unstable.status
        end = f"{why} at {unstable.rate:g}"
    else:
        end = "cap reached" if group[-1].rate >= frontier.cap else "sweep not ended"
    best = min(stable, key=lambda trial: trial.validation_loss, default=None)
    close = [trial.rate for trial in stable if trial.validation_loss <= best.validation_loss + CLOSE]
    return Sweep(
        assignment=group[0].assignment,
        label=group[0].label,
        solver=group[0].solver,
        largest=largest,
        end=end,
        best=best,
        close=max(close, default=None),
    )
