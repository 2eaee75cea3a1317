"""What an optimiser's step costs: operations, here and on an accelerator."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks.flops import Flops, Loop, count_flops
from experiments.benchmarks.jaxprs import choices, live
from experiments.benchmarks.optimizers import Contender
from experiments.benchmarks.trips import Measured, measure

HERE, ACCELERATOR = "cpu", "tpu"


class StepCosts(NamedTuple):
    """Operations of one step of the whole optimiser."""

    here: Flops
    """As a CPU runs it: eigendecompositions, one matrix after the other."""
    accelerator: Flops
    """As a GPU or TPU runs it: matrix products, whole stacks at once."""


class Position(NamedTuple):
    """Where an optimiser is before a step."""

    params: Any
    state: Any
    gradient: Any

    def of_layers(self, layers: Sequence[int]) -> "Position":
        """The same of a model that has these of the blocks alone."""
        chosen = np.array(layers)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf[chosen] if _of_blocks(path) else leaf, self
        )


def _of_blocks(path: jax.tree_util.KeyPath) -> bool:
    return "h" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def measured_step(contender: Contender, position: Position, platform: str) -> Measured:
    """What data decides in a step, found by running it here as on this platform (if there is anything)."""
    program = live(jax.make_jaxpr(contender.step)(*position))
    found = choices(program.jaxpr, platform)
    if not found.loops and not found.conds:
        return Measured((), ())
    return measure(contender.step, *position, platform=platform)[1]


def trips(contender: Contender, position: Position, platform: str) -> Sequence[float]:
    """The trips alone of `measured_step`."""
    return measured_step(contender, position, platform).trips


def step_flops(
    contender: Contender, params: Any, platform: str, measured: Measured, iterations: float | None = None
) -> Flops:
    """Operations of a step.

    Args:
      contender: the optimiser.
      params: its parameters; their shapes suffice.
      platform: whose branches run.
      measured: in a step of the same contender on any parameters of the same names.
      iterations: of the solver, instead of the measured.
    """

    def of(loop: Loop) -> float:
        # The solver's iterations are the only loops that stand in no other.
        chosen = iterations is not None and loop.depth == 0
        return turns(iterations) if chosen else measured.trips[loop.number]

    params = jax.eval_shape(lambda x: x, params)
    state = jax.eval_shape(contender.optimizer.init, params)
    shares = measured.shares.__getitem__
    return count_flops(contender.step, params, state, params, platform=platform, trips=of, shares=shares)


def turns(iterations: float) -> float:
    """Trips of the solver's loop for so many iterations: the first evaluates the start."""
    return iterations + 1


def inner_trips(contender: Contender, params: Any, platform: str, measured: Measured) -> float:
    """Mean trips of the loops that stand in the solver's loop; 0 if there are none.

    Args:
      contender: the optimiser.
      params: its parameters.
      platform: whose branches run.
      measured: see `measured_step`.
    """
    inner: list[float] = []

    def ask(loop: Loop) -> float:
        if loop.depth > 0:
            inner.append(measured.trips[loop.number])
        return 1

    state = jax.eval_shape(contender.optimizer.init, params)
    count_flops(contender.step, params, state, params, platform=platform, trips=ask)
    return sum(inner) / len(inner) if inner else 0.0
