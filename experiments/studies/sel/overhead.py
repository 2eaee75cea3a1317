"""What SEL costs a training step: both methods' steps by turns, in one process, on one batch."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import jax
import numpy as np

from experiments.config import Run
from experiments.corpus import Corpus, train_batches
from experiments.files import read_json, write_json
from experiments.optimizers import make_optimizer
from experiments.train import init_state, make_train_step

PAIRS = 24
"""Steps of each method that are timed."""
_WARM_UP = 3


@dataclass(frozen=True)
class Overhead:
    """The contents of an overhead's file: quartiles over pairs of steps."""

    pairs: int
    baseline_seconds: list[float]
    """Of one step: first quartile, median, third quartile."""
    sel_seconds: list[float]
    ratio: list[float]
    """SEL's time over the baseline's, pair by pair."""


def overhead(baseline: Run, sel: Run, corpus: Corpus, path: Path) -> Overhead:
    """Times both methods' steps, or reads what an earlier call wrote.

    Within a pair the two follow each other at once, first one and then the other, so that what else the
    machine does falls on both.

    Args:
      baseline: the run without SEL.
      sel: the same with it.
      corpus: the text, of which one batch is used throughout.
      path: of the JSON file; its folder exists.
    """
    if (stored := read_overhead(path)) is not None:
        return stored
    timed = [_timed_step(config, corpus) for config in (baseline, sel)]
    for _ in range(_WARM_UP):
        for step in timed:
            step()
    seconds = np.empty((PAIRS, 2))
    for pair in range(PAIRS):
        for method in (0, 1) if pair % 2 else (1, 0):
            seconds[pair, method] = timed[method]()
    found = Overhead(
        pairs=PAIRS,
        baseline_seconds=_quartiles(seconds[:, 0]),
        sel_seconds=_quartiles(seconds[:, 1]),
        ratio=_quartiles(seconds[:, 1] / seconds[:, 0]),
    )
    write_json(path, asdict(found))
    return found


def read_overhead(path: Path) -> Overhead | None:
    """What `overhead` wrote; None if it has not yet.

    Raises:
      InputError: the file is damaged.
    """
    if not path.exists():
        return None
    names = [field.name for field in fields(Overhead)]
    content = read_json(path, require=names)
    return Overhead(**{name: content[name] for name in names})


def _timed_step(config: Run, corpus: Corpus) -> Callable[[], float]:
    """A function that makes one update and gives the seconds that it took."""
    optimizer = make_optimizer(config)
    state = jax.jit(lambda: init_state(config, optimizer))()
    train_step = make_train_step(config, optimizer)
    (tokens,) = train_batches(
        corpus,
        batch_size=config.data.batch_size,
        context=config.model.context,
        seed=config.seed,
        start_step=0,
        stop_step=1,
    )
    tokens = jax.block_until_ready(jax.device_put(tokens))

    def step() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, tokens))
        return time.perf_counter() - start

    return step


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))]
