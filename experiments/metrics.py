"""A run's metrics: JSON lines, and the same numbers as TensorBoard events."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from experiments.files import write_whole

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to a run's `metrics.jsonl` and to its TensorBoard events; a context manager."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """Opens the files, without what an earlier start wrote beyond the step now resumed from.

        Args:
          run_dir: the run's folder, which exists.
          resume_step: the completed updates of the checkpoint that is resumed from: later lines are
            dropped. None starts anew: all are dropped.
        """
        path = run_dir / FILE_NAME
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


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics, one dict per line; a last line that a kill cut short is left out.

    Raises:
      ValueError: another line is not JSON.
    """
    path = run_dir / FILE_NAME
    *lines, _cut = path.read_text(encoding="utf-8").split("\n")
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}, is not JSON ({error}): remove it or the file"
            ) from error
    return metrics


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
