"""Where a run's numbers go: JSON lines and TensorBoard events always, Weights & Biases if asked for."""

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from tensorboardX import SummaryWriter

from experiments.errors import InputError
from experiments.files import CONFIG, METRICS, read_json, read_lines, write_whole

WANDB = "wandb.json"
"""In a run's folder: its project and id at Weights & Biases, and the first step that is still to be sent."""


class Logger(Protocol):
    """Takes a run's numbers as they come."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Takes what `plain` gave of one line; `step` is never less than in an earlier call."""

    def flush(self) -> None:
        """Returns once all lines so far are on disk, or sent; the last step is complete."""

    def close(self, failed: bool) -> None:
        """Ends; `failed` if by an error, perhaps within a step."""


def open_loggers(run_dir: Path, resume_step: int | None = None, wandb: str | None = None) -> list[Logger]:
    """Opens a run's loggers, without what an earlier start wrote beyond the step now resumed from.

    Args:
      run_dir: the run's folder, which exists.
      resume_step: the completed updates of the checkpoint that is resumed from: later lines are dropped. None
        starts anew: all are dropped.
      wandb: project at Weights & Biases, which gets the numbers too.

    Raises:
      InputError: the metrics are damaged, or Weights & Biases cannot be used.
    """
    loggers: list[Logger] = [JsonLines(run_dir, resume_step), TensorBoard(run_dir, resume_step)]
    return loggers if wandb is None else [*loggers, WeightsAndBiases(run_dir, wandb)]


class JsonLines:
    """`metrics.jsonl`: a line a call, which others can read at once."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        path = run_dir / METRICS
        if path.exists():
            kept = [] if resume_step is None else [x for x in read_lines(path)[0] if x["step"] <= resume_step]
            write_whole(path, "".join(map(_line, kept)))
        # Line-buffered, so that a run can be followed while it lasts.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(_line({"kind": kind, "step": step, **values}))

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        self.flush()
        self._file.close()


class TensorBoard:
    """Event files, which hold the finite numbers as scalars."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        purge_step = 0 if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(run_dir), purge_step=purge_step)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        for tag, number in scalars(kind, values):
            self._events.add_scalar(tag, number, step)

    def flush(self) -> None:
        self._events.flush()

    def close(self, failed: bool) -> None:
        self._events.close()


class WeightsAndBiases:
    """One run at Weights & Biases for all starts of a run: each step is sent once, whole, in whichever start.

    Its history cannot be cut. Steps that are computed again after a kill are not sent again, and steps of a
    start that was not logged there are sent from `metrics.jsonl`. Offline, a kill loses what the package has
    not written yet, up to 32 kB; SIGTERM, and any error, lose nothing.
    """

    def __init__(self, run_dir: Path, project: str) -> None:
        wandb, path = import_wandb(), run_dir / WANDB
        self._state = {"project": project, "id": uuid.uuid4().hex[:12], "next": 0}
        if path.exists():
            self._state = read_json(path, require=tuple(self._state))
        if self._state["project"] != project:
            raise InputError(
                f"{run_dir} is in project {self._state['project']!r} at Weights & Biases: name that one, not "
                f"{project!r}"
            )
        try:
            self._run = wandb.init(
                project=project,
                id=self._state["id"],
                resume="allow",
                name=run_dir.resolve().name,
                config=read_json(run_dir / CONFIG),
                dir=str(run_dir),
            )
        except wandb.Error as error:
            raise InputError(
                f"Weights & Biases: {error}. Log in with `wandb login`, or keep its files here with "
                "WANDB_MODE=offline"
            ) from error
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._row: dict[str, float] = {}
        """Of step `next`, as far as it is known."""
        # Online its server knows what it has; offline only the file does.
        self._mark(max(self._state["next"], self._run.starting_step))
        for line in read_lines(run_dir / METRICS)[0]:
            kind, step = line.pop("kind"), line.pop("step")
            self.write(kind, step, line)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if step < self._state["next"]:
            return
        if step > self._state["next"]:
            self.flush()
            self._state["next"] = step
        self._row.update(scalars(kind, values))

    def flush(self) -> None:
        if self._row:
            step = self._state["next"]
            self._run.log(self._row, step=step, commit=True)
            self._mark(step + 1)
            self._row = {}

    def close(self, failed: bool) -> None:
        if not failed:  # Otherwise the last step may not be whole, and is made again.
            self.flush()
        self._run.finish(exit_code=int(failed))
        os.close(self._file)

    def _mark(self, step: int) -> None:
        """Keeps that all steps before this one are sent."""
        self._state["next"] = step
        # In place, as it is written at every step: a kill does not part so short a write.
        os.ftruncate(self._file, os.pwrite(self._file, json.dumps(self._state).encode(), 0))


def import_wandb() -> ModuleType:
    """The package, which nothing else here imports.

    Raises:
      InputError: it is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise InputError('Weights & Biases is not installed: pip install -e ".[wandb]"') from error
    return wandb


def plain(value: Any) -> Any:
    """`value` as JSON has it: lists for arrays, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    value = np.asarray(value).tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if math.isfinite(value) else None


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags, `kind/name` or, for what lies in dicts, its own path; and the largest number over the layers."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _nested_scalars(name, value)
        elif value is not None:
            yield f"{kind}/{name}", value


def _nested_scalars(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _nested_scalars(f"{prefix}/{name}", value)
        elif finite := [number for number in value if number is not None]:
            yield f"{prefix}/{name}", max(finite)


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
