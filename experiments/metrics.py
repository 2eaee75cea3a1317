"""What a run records: JSON lines, the same numbers as TensorBoard events, and a progress bar."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from tensorboardX import SummaryWriter
from tqdm import tqdm

from experiments.config import Run, Status
from experiments.files import METRICS, read_lines, write_whole


class MetricsWriter:
    """Appends to a run's `metrics.jsonl` and to its TensorBoard events; a context manager."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """Opens the files, without what an earlier start wrote beyond the step now resumed from.

        Args:
          run_dir: the run's folder, which exists.
          resume_step: the completed updates of the checkpoint that is resumed from: later lines are
            dropped. None starts anew: all are dropped.
        """
        path = run_dir / METRICS
        if path.exists():
            kept = (
                [] if resume_step is None else [m for m in read_metrics(run_dir) if m["step"] <= resume_step]
            )
            write_whole(path, "".join(map(_line, kept)))
        # Line-buffered, so that a run can be followed while it lasts.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        purge_step = 0 if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(run_dir), purge_step=purge_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes, then closes the files."""
        self.flush()
        self._file.close()
        self._events.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Appends one line, and its finite numbers as TensorBoard scalars.

        Args:
          kind: `train`, `eval` or `speed`.
          step: completed updates; never less than in an earlier call.
          **values: numbers, or dicts (of dicts) of arrays with one number per layer; TensorBoard gets
            their largest over the layers.
        """
        plain = _plain(values)
        self._file.write(_line({"kind": kind, "step": step, **plain}))
        for tag, number in _scalars(kind, plain):
            self._events.add_scalar(tag, number, step)

    def flush(self) -> None:
        """Returns once all lines so far are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._events.flush()


class _Silent:
    """In the place of a MetricsWriter where another process has it."""

    def close(self) -> None: ...

    def write(self, kind: str, step: int, **values: Any) -> None: ...

    def flush(self) -> None: ...


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics, one dict per line; a last line that a kill cut short is left out.

    Raises:
      InputError: another line is damaged.
    """
    return read_lines(run_dir / METRICS)[0]


def _broken(numbers: Mapping[str, Any]) -> list[str]:
    """Which of an update's numbers are not finite; in a stored line they are None."""
    return [name for name in Update._fields if numbers[name] is None or not math.isfinite(numbers[name])]


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """`value` as JSON has it: lists for arrays, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    value = np.asarray(value).tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None


def _scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """TensorBoard's tags, `kind/name` or, for what lies in dicts, its own path; and their numbers."""
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


class Update(NamedTuple):
    """What is recorded of one update, as scalars."""

    loss: Array
    """The mean loss before the update, nats per token."""
    gradient_norm: Array
    """The gradient's global norm before clipping."""
    learning_rate: Array
    """AdamW's."""


class RunEnded(Exception):
    """The run has ended before its last step; this is a result, not an error."""

    def __init__(self, status: Status, step: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.step, self.reason = status, step, reason


class RunLog:
    """Records a run as it goes, and says when it cannot go on; a context manager."""

    def __init__(
        self, config: Run, run_dir: Path, resume_step: int | None, progress: bool, writes: bool = True
    ) -> None:
        """Opens the run's metrics as `MetricsWriter` does, and shows a progress bar if asked to.

        Where it does not write, it only says when the run cannot go on.
        """
        self._config = config
        self._metrics = MetricsWriter(run_dir, resume_step) if writes else _Silent()
        self._bar = tqdm(
            desc=config.optimizer.name,
            total=config.steps,
            initial=resume_step or 0,
            unit="step",
            disable=not (progress and writes),
            mininterval=0.5 if sys.stderr.isatty() else 60.0,  # In a log file, a line a minute.
            maxinterval=60.0,
            dynamic_ncols=True,
        )
        lines = read_metrics(run_dir)
        self._validation_losses: list[float | None] = [x["loss"] for x in lines if x["kind"] == "eval"]
        self._skipped = 0
        """Updates in a row up to now that were left out."""
        for line in lines:
            if line["kind"] == "train":
                self._count(_broken(line))
        self._unread: list[tuple[int, Update]] = []
        self._read_at: float | None = None
        self._timed_steps, self._seconds = 0, 0.0

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
        self._metrics.close()

    @property
    def validation_loss(self) -> float | None:
        """Of the last evaluation; None if it was not finite, or if there was none."""
        return self._validation_losses[-1] if self._validation_losses else None

    @property
    def best_validation_loss(self) -> float | None:
        """The lowest; None if none was finite."""
        return min((loss for loss in self._validation_losses if loss is not None), default=None)

    def update(self, step: int, update: Update) -> None:
        """Keeps an update's numbers, on the device, for the next `read`."""
        self._unread.append((step, update))

    def read(self) -> None:
        """Waits for the kept updates, reads their numbers in one transfer, and records them.

        Every `log_every` steps it records the speed too. The time until the first read, which holds the
        step's compilation, does not count, nor does that of evaluations.

        Raises:
          RunEnded: a number is not finite.
        """
        updates, self._unread = jax.device_get(self._unread), []
        now = time.perf_counter()
        for step, update in updates:
            numbers = update._asdict()
            self._metrics.write("train", step, **numbers)
            if self._count(broken := _broken(numbers)) > self._config.optimizer.skips:
                name = broken[0]
                raise RunEnded("non-finite", step, f"{name} is {numbers[name]} at update {step}")
        if self._read_at is not None:
            self._timed_steps += len(updates)
            self._seconds += now - self._read_at
        self._read_at = now
        step, update = updates[-1]
        if self._timed_steps and step % self._config.log_every == 0:
            self._speed(step, update.loss)
        self._bar.update(len(updates))

    def _count(self, broken: list[str]) -> int:
        """Updates in a row that were left out, with this one."""
        self._skipped = self._skipped + 1 if broken else 0
        return self._skipped

    def _speed(self, step: int, loss: float) -> None:
        tokens = self._timed_steps * self._config.data.batch_size * self._config.model.context
        rate = tokens / self._seconds
        self._metrics.write("speed", step, tokens_per_second=rate, seconds=self._seconds)
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self._timed_steps, self._seconds = 0, 0.0

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Records an evaluation: its `loss` and probes.

        Raises:
          RunEnded: its loss is not finite, or too far above the best so far.
        """
        self._metrics.write("eval", step, **values)
        loss = float(values["loss"])
        self._validation_losses.append(loss if math.isfinite(loss) else None)
        if self._read_at is not None:
            self._read_at = time.perf_counter()
        if not math.isfinite(loss):
            raise RunEnded("non-finite", step, f"validation loss is {loss} after update {step}")
        best = self.best_validation_loss
        if loss > best + self._config.divergence_margin:
            raise RunEnded("diverged", step, f"validation loss {loss:.4f}, after a best of {best:.4f}")

    def flush(self) -> None:
        """Returns once the metrics so far are on disk."""
        self._metrics.flush()
