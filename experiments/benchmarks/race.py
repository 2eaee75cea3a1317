"""Optimisers timed side by side: each trains its own copy of a model, one step each in turn.

Only the update and its application are timed, not the gradient, which is that of the optimiser's own
parameters; buffers are donated, as in training. In turn, because a machine's speed drifts: within a round
all have the same machine.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments.benchmarks.optimizers import Contender, iterations
from experiments.benchmarks.workload import Workload


class Racer(Protocol):
    """An optimiser under way."""

    name: str
    params: Any
    """GPT-2's parameters as they are now."""

    def step(self, gradient: Any) -> float:
        """Makes a step, and gives the seconds that it took."""
        ...


class JaxRacer:
    """A contender under way, its step compiled ahead of time."""

    def __init__(self, contender: Contender, params: Any) -> None:
        self.name = contender.name
        self.contender = contender
        self.params = jax.jit(contender.prepare)(params)
        self.state = jax.jit(contender.optimizer.init)(self.params)
        lowered = jax.jit(contender.step, donate_argnums=(0, 1)).lower(self.params, self.state, self.params)
        self.compiled = lowered.compile()
        self.iterations: list[dict[str, np.ndarray]] = []
        """What the solver took in each timed step, matrix by matrix, if it says so."""

    def step(self, gradient: Any) -> float:
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, gradient)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start

    @property
    def temporaries(self) -> int:
        """Bytes that the compiled step allocates besides its arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes


def race(racers: Sequence[Racer], workload: Workload) -> Iterator[tuple[str, int, float | None]]:
    """Lets them take their steps, in turn.

    Args:
      racers: who takes part.
      workload: the gradients, and how many steps there are.

    Returns:
      An iterator over what has just been done: (name, step, seconds), seconds None in the warm steps.
    """
    spent = dict.fromkeys((racer.name for racer in racers), 0.0)
    steps = range(-workload.warm_steps, workload.timed_steps)
    for step, tokens in zip(steps, workload.batches(), strict=False):
        for racer in racers:
            if spent[racer.name] > workload.seconds:
                continue
            gradient = jax.block_until_ready(workload.gradient(racer.params, tokens))
            seconds = racer.step(gradient)
            if step >= 0:
                spent[racer.name] += seconds
                if isinstance(racer, JaxRacer) and (made := iterations(racer.state)):
                    racer.iterations.append(made)
            yield racer.name, step, seconds if step >= 0 else None
