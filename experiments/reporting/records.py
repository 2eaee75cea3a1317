"""Stored runs: what a study's run directories hold."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from experiments.config import MATRICES, Status, differences
from experiments.errors import InputError
from experiments.files import CONFIG, METRICS, RESULT, read_json, read_lines
from experiments.reporting import panels

_STATUSES = get_args(Status)


@dataclass(frozen=True)
class RunRecord:
    """What one run directory holds."""

    name: str
    facts: dict[str, Any]
    """`config`, `versions` and `corpus` of config.json."""
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    step: int
    """The last step that the metrics speak of."""
    result: dict[str, Any] | None
    """result.json; None while the run has not ended."""
    damaged_tail: bool = False
    """The last line of the metrics was cut short and left out."""

    @property
    def config(self) -> dict[str, Any]:
        return self.facts["config"]

    @property
    def finished(self) -> bool:
        return self.result is not None and self.result["status"] == "finished"

    @property
    def status(self) -> str:
        if self.result is None:
            return f"running, step {self.step} of {self.config['steps']}"
        return "finished" if self.finished else f"{self.result['status']} at step {self.result['step']}"

    @property
    def final(self) -> float | None:
        """Validation loss at the end of an ended run."""
        return self.result["validation_loss"] if self.result else None

    @property
    def best(self) -> float | None:
        """Lowest validation loss, so far in a run that has not ended."""
        if self.result:
            return self.result["best_validation_loss"]
        return min(finite(self.losses("eval")[1]), default=None)

    @property
    def last(self) -> float | None:
        """Validation loss at the end, or the last finite one so far in a run that has not ended."""
        if self.result:
            return self.final
        return next(reversed(finite(self.losses("eval")[1])), None)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, in the order measured."""
        return finite(np.array([_number(line["tokens_per_second"]) for line in self.speed]))

    def seconds(self, steps: np.ndarray) -> np.ndarray:
        """Seconds of training up to each of the steps, at the speeds that were measured on the way.

        Evaluations and compilation do not count. NaN where no speed was measured.
        """
        measured = [line for line in self.speed if line["tokens_per_second"]]
        if not measured:
            return np.full(len(steps), np.nan)
        tokens = self.config["data"]["batch_size"] * self.config["model"]["context"]
        each = np.array([tokens / line["tokens_per_second"] for line in measured])
        until = np.append(_steps(measured), self.step)
        total = np.cumsum(np.diff(until, prepend=0) * np.append(each, each[-1]))
        return np.interp(steps, np.append(0, until), np.append(0, total))

    def updates(self, quantity: str) -> panels.Curve:
        """`learning_rate` or `gradient_norm` of every update."""
        return _steps(self.train), np.array([_number(line.get(quantity)) for line in self.train])

    def losses(self, kind: str) -> panels.Curve:
        """The losses of the `train` or `eval` lines."""
        lines = self.train if kind == "train" else self.evals
        return _steps(lines), np.array([_number(line["loss"]) for line in lines])

    def probe(self, *path: str, over_layers: Callable[[np.ndarray], float] = np.max) -> panels.Curve:
        """A per-layer measurement of the evaluations, e.g. `probe("weights", "mlp/c_fc", "sigma_max")`.

        Args:
          path: keys inside an eval line; where one is missing the value is NaN.
          over_layers: reduces the layers' values; NaN in any layer makes the whole NaN.
        """
        values = []
        for line in self.evals:
            found: Any = line
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            layers = np.array([_number(value) for value in found or [None]])
            values.append(float(over_layers(layers)))
        return _steps(self.evals), np.array(values)

    def peak(self, *path: str, over_layers: Callable[[np.ndarray], float] = np.max) -> float | None:
        """The largest finite value of a measurement (see `probe`) over the evaluations; None if none is."""
        return max(finite(self.probe(*path, over_layers=over_layers)[1]), default=None)

    def violation(self) -> panels.Curve:
        """Largest violation of the assigned constraints, over matrices and layers."""
        return self._over_matrices("weights", "violation")

    def solver(self, quantity: str) -> panels.Curve:
        """Largest `iterations` or `gap` of the step before each evaluation, over matrices and layers."""
        return self._over_matrices("solver", quantity)

    def _over_matrices(self, group: str, quantity: str) -> panels.Curve:
        each = [self.probe(group, matrix, quantity)[1] for matrix in MATRICES]
        return _steps(self.evals), np.max(each, axis=0)


def read_runs(study_dir: Path) -> list[RunRecord]:
    """The runs of a study, in the order of the table.

    Raises:
      InputError: `study_dir` is not there, no folder in it has a config.json, or a file is damaged. A cut
        last line of metrics.jsonl is no damage: a killed run leaves one.
    """
    study_dir = Path(study_dir)
    if not study_dir.is_dir():
        raise InputError(f"{study_dir} is not a directory")
    found = {path.parent.name: path.parent for path in study_dir.glob(f"*/{CONFIG}")}
    if not found:
        raise InputError(
            f"no run in {study_dir}: expected one folder per run, each with a config.json (name the study's "
            "directory, not one run's)"
        )
    return [read_run(found[name]) for name in panels.styles(found)]


def read_run(run_dir: Path) -> RunRecord:
    """The run of a folder that has a config.json.

    Raises:
      InputError: a file is damaged, as in `read_runs`.
    """
    facts = read_json(run_dir / CONFIG, require=("config", "versions", "corpus"))
    if missing := [name for name in ("model", "data", "optimizer", "steps") if name not in facts["config"]]:
        raise InputError(f"{run_dir / CONFIG}: config lacks {', '.join(missing)}")
    result_path = run_dir / RESULT
    result = None
    if result_path.exists():
        result = read_json(result_path, require=("status", "step", "validation_loss", "best_validation_loss"))
        if result["status"] not in _STATUSES:
            raise InputError(f"{result_path}: status {result['status']!r} is none of {', '.join(_STATUSES)}")
    lines, damaged_tail = read_lines(run_dir / METRICS)
    of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "speed")}
    return RunRecord(
        name=run_dir.name,
        facts={key: facts[key] for key in ("config", "versions", "corpus")},
        train=of_kind["train"],
        evals=of_kind["eval"],
        speed=of_kind["speed"],
        step=max((line["step"] for line in lines), default=0),
        result=result,
        damaged_tail=damaged_tail,
    )


def final_loss(status: str, validation_loss: float | None) -> float | None:
    """A run's last validation loss, if it made all its updates."""
    return validation_loss if status == "finished" else None


def loss_of(run: RunRecord) -> float | None:
    """A run's final loss, if it made all its updates."""
    return final_loss(run.result["status"], run.final) if run.result else None


def losses_of(runs: Iterable[RunRecord]) -> list[float]:
    """Final losses of the runs that made all their updates."""
    return [loss for run in runs if (loss := loss_of(run)) is not None]


def cut_notes(runs: Iterable[RunRecord]) -> list[str]:
    """Which runs' metrics end in a line that was cut."""
    return [
        f"{run.name}: the last line of metrics.jsonl was cut short (a killed run leaves one) and is left out."
        for run in runs
        if run.damaged_tail
    ]


def comparison_notes(runs: Sequence[RunRecord], may_differ: Sequence[str], names: str) -> list[str]:
    """What a reader must know before comparing runs: cut metrics, and differences that no one asked for.

    Args:
      runs: at least one.
      may_differ: fields of config.json, such as `config.optimizer.name`.
      names: what those fields are, in words.
    """
    notes = cut_notes(runs)
    first, expected = runs[0], tuple(f"{name}: " for name in may_differ)
    for run in runs[1:]:
        changed = [line for line in differences(first.facts, run.facts) if not line.startswith(expected)]
        if changed:
            notes.append(f"{first.name} and {run.name} differ in more than {names}: {'; '.join(changed)}.")
    return notes


def _steps(lines: Sequence[dict[str, Any]]) -> np.ndarray:
    return np.array([line["step"] for line in lines], dtype=float)


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def finite(values: np.ndarray) -> list[float]:
    """The finite numbers, as floats."""
    return [float(value) for value in values if np.isfinite(value)]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return float(np.mean(values)) if values else None


def ends(curves: Sequence[panels.Curve]) -> tuple[float | None, float | None]:
    """The mean of the curves' first values, and that of their last ones; None where none is finite."""
    first, last = (np.array([values[end] for _, values in curves if len(values)]) for end in (0, -1))
    return mean(finite(first)), mean(finite(last))


def mean_curve(curves: Sequence[panels.Curve]) -> panels.Curve:
    """The mean at the steps that all curves have, which are the first ones."""
    shared = min(len(steps) for steps, _ in curves)
    return curves[0][0][:shared], np.mean([values[:shared] for _, values in curves], axis=0)
