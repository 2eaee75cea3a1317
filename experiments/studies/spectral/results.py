"""What a spectral study's files say: whether rates transfer, whether sizes hold, and how inputs align."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.config import PARAMETRIZATIONS
from experiments.probes import NARROWING
from experiments.reporting.panels import Curve
from experiments.reporting.records import RunRecord, ends, loss_of, mean, read_runs
from experiments.studies.spectral.check import LOGITS, read_check
from experiments.studies.spectral.plan import (
    Check,
    SpectralStudy,
    Sweep,
    Trial,
    trial_of,
)
from experiments.studies.sweeps import Losses, best_rate, beyond_the_edge
from spectral import CoordinateCheck, target_norm

Runs = Mapping[Trial, RunRecord]


@dataclass(frozen=True)
class SweepRow:
    """One width of a parametrisation under an optimizer; None where runs are missing or diverged."""

    parametrization: str
    optimizer: str
    width: int
    losses: dict[str, list[float | None]]
    """Rate -> final validation loss of each seed; None where it did not make all its updates."""
    best_rate: float | None
    """With the lowest mean, of the rates with no such seed."""
    best_loss: float | None
    """Its mean."""
    at_an_end: bool
    """The best rate is the lowest or highest that was tried: a better one may lie beyond."""


@dataclass(frozen=True)
class TransferRow:
    """What becomes of a rate that is tuned at the smallest width."""

    parametrization: str
    optimizer: str
    tuned_rate: float | None
    """The best at the smallest width."""
    best_rate: float | None
    """The best at the largest."""
    shift: float | None
    """Factors of 2 from the one to the other."""
    transferred: Literal["finished", "diverged", "not tried"]
    """How the largest width's runs at the tuned rate ended."""
    transferred_loss: float | None
    """Theirs, if all finished."""
    best_loss: float | None
    excess: float | None
    """The transferred loss over the best, minus 1."""


@dataclass(frozen=True)
class CheckRow:
    """The slopes of a coordinate check: exponents of the width. None where a size was 0 or not finite."""

    parametrization: str
    optimizer: str
    growth: str
    features: list[float | None]
    """The least and the largest slope of the blocks' features after the last step."""
    changes: list[float | None]
    """The same of their changes."""
    logits: float | None
    logit_changes: float | None


@dataclass(frozen=True)
class InputRow:
    """The narrowing matrix and its inputs at a sweep's best rate, at the start and at the end.

    Means over layers and seeds.
    """

    parametrization: str
    optimizer: str
    width: int
    norm: tuple[float | None, float | None]
    """||W||_2 over sqrt(fan_out / fan_in)."""
    null_space: tuple[float | None, float | None]
    """Share of ||x||^2 in the null space."""
    alignment: tuple[float | None, float | None]
    """||W x|| over ||W||_2 ||x||."""


def read_study(study_dir: Path) -> tuple[SpectralStudy, dict[Trial, RunRecord]]:
    """A study's plan, and its runs by what they are, in the order of the tables.

    Raises:
      InputError: as `read_runs`, or `spectral.json` is damaged.
    """
    study = SpectralStudy.load(study_dir)
    runs = {trial_of(run.config): run for run in read_runs(study_dir)}
    return study, {trial: runs[trial] for trial in sorted(runs)}


def seed_losses(runs: Runs, sweep: Sweep, seeds: int) -> dict[float, list[float | None]]:
    """Rate, ascending -> final losses of its seeds, of the rates whose seeds have all ended."""
    found: dict[float, list[float | None]] = {}
    for trial, run in runs.items():
        if trial.sweep == sweep and run.result:
            found.setdefault(trial.rate, []).append(loss_of(run))
    return {rate: losses for rate, losses in sorted(found.items()) if len(losses) == seeds}


def sweep_losses(runs: Runs, sweep: Sweep, seeds: int) -> Losses:
    """The same with the mean over the seeds, and None where one did not make all its updates."""
    found = seed_losses(runs, sweep, seeds)
    return {rate: None if None in losses else mean(losses) for rate, losses in found.items()}


def sweep_rows(runs: Runs, study: SpectralStudy) -> list[SweepRow]:
    """A row for every sweep that has begun."""
    rows = []
    for which in pairs(study):
        for width in study.widths:
            losses = sweep_losses(runs, Sweep(*which, width), study.seeds)
            if losses:
                best = best_rate(losses)
                seeds = seed_losses(runs, Sweep(*which, width), study.seeds)
                by_name = {f"{rate:g}": found for rate, found in seeds.items()}
                at_an_end = beyond_the_edge(losses) is not None
                rows.append(SweepRow(*which, width, by_name, best, losses.get(best), at_an_end))
    return rows


def transfer_rows(runs: Runs, study: SpectralStudy) -> list[TransferRow]:
    """A row for each parametrisation under each optimizer."""
    rows = []
    for which in pairs(study):
        small, large = (
            sweep_losses(runs, Sweep(*which, width), study.seeds)
            for width in (min(study.widths), max(study.widths))
        )
        tuned, best = best_rate(small), best_rate(large)
        known = tuned is not None and best is not None
        transferred, least = large.get(tuned), large.get(best)
        ending = "not tried" if tuned not in large else "diverged" if transferred is None else "finished"
        rows.append(
            TransferRow(
                *which,
                tuned_rate=tuned,
                best_rate=best,
                shift=float(np.log2(best / tuned)) if known else None,
                transferred=ending,
                transferred_loss=transferred,
                best_loss=least,
                excess=None if transferred is None else transferred / least - 1,
            )
        )
    return rows


def read_checks(study: SpectralStudy, study_dir: Path) -> dict[Check, CoordinateCheck]:
    """The checks that have been made."""
    found = {check: read_check(study_dir, check) for check in study.checks}
    return {check: made for check, made in found.items() if made is not None}


def check_rows(checks: Mapping[Check, CoordinateCheck]) -> list[CheckRow]:
    """A row for each check, the parametrisations side by side."""
    rows = []
    for check, made in checks.items():
        blocks = [slope for name, slope in made.slopes.items() if name != LOGITS]
        logits = made.slopes[LOGITS]
        rows.append(
            CheckRow(
                *check,
                features=_range([slope.features for slope in blocks]),
                changes=_range([slope.changes for slope in blocks]),
                logits=_finite(logits.features),
                logit_changes=_finite(logits.changes),
            )
        )
    return rows


def input_rows(runs: Runs, study: SpectralStudy) -> list[InputRow]:
    """A row for every sweep that has a best rate."""
    rows = []
    for which in pairs(study):
        for width in study.widths:
            found = at_best_rate(runs, Sweep(*which, width), study.seeds)
            if found:
                both = {quantity: ends([curve(run) for run in found]) for quantity, curve in CURVES.items()}
                rows.append(InputRow(*which, width, **both))
    return rows


def at_best_rate(runs: Runs, sweep: Sweep, seeds: int) -> list[RunRecord]:
    """The runs of a sweep at its best rate; none if there is none."""
    best = best_rate(sweep_losses(runs, sweep, seeds))
    return [run for trial, run in runs.items() if trial.sweep == sweep and trial.rate == best]


def _norm(run: RunRecord) -> Curve:
    steps, norms = run.probe("weights", NARROWING, "sigma_max", over_layers=np.mean)
    return steps, norms / target_norm(4, 1)


CURVES = {
    "norm": _norm,
    "null_space": lambda run: run.probe("inputs", NARROWING, "null_space", over_layers=np.mean),
    "alignment": lambda run: run.probe("inputs", NARROWING, "alignment", over_layers=np.mean),
}
"""Quantity of an `InputRow` -> its curve over a run's steps."""


def pairs(study: SpectralStudy) -> list[tuple[str, str]]:
    """Parametrisation and optimizer, in the order of the tables."""
    return [(each, optimizer) for optimizer in study.rates for each in PARAMETRIZATIONS]


def _range(slopes: Sequence[float]) -> list[float | None]:
    return [_finite(min(slopes)), _finite(max(slopes))] if np.isfinite(slopes).all() else [None, None]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
