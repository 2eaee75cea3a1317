"""What a run records, with a progress bar, and when it cannot go on."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
from tqdm import tqdm

from experiments.config import Run, Status
from experiments.files import METRICS, read_lines
from experiments.loggers import Logger, open_loggers, plain


class MetricsWriter:
    """Gives a run's numbers to its loggers; a context manager."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for logger in self._loggers:
            logger.close(failed=kind is not None)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Records one line.

        Args:
          kind: `train`, `eval` or `speed`.
          step: completed updates; never less than in an earlier call.
          **values: numbers, or dicts (of dicts) of arrays with one number per layer.
        """
        numbers = plain(values)
        for logger in self._loggers:
            logger.write(kind, step, numbers)

    def flush(self) -> None:
        """Returns once all lines so far are on disk; the last step written is complete."""
        for logger in self._loggers:
            logger.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics, one dict per line; a last line that a kill cut short is left out.

    Raises:
      InputError: another line is damaged.
    """
    return read_lines(run_dir / METRICS)[0]


def _broken(numbers: Mapping[str, Any]) -> list[str]:
    """Which of an update's numbers are not finite; in a stored line they are None."""
    return [name for name in Update._fields if numbers[name] is None or not math.isfinite(numbers[name])]


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
        self,
        config: Run,
        run_dir: Path,
        resume_step: int | None,
        progress: bool,
        writes: bool = True,
        wandb: str | None = None,
    ) -> None:
        """Opens the run's metrics as `open_loggers` does, and shows a progress bar if asked to.

        Where it does not write, it only says when the run cannot go on.
        """
        self._config = config
        self._metrics = MetricsWriter(open_loggers(run_dir, resume_step, wandb) if writes else ())
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
        self._metrics.__exit__(*exception)

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
