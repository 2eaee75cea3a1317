"""Learning rates of the scales, each with its own course over training."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from sel_jax.parameters import labels
from sel_jax.symexplin import check_names


class ScaleRatesState(NamedTuple):
    """State of `scale_rates`."""

    count: Int[Array, ""]  # type: ignore[assignment]  # as optax calls it; tuples have a method of the name
    """Updates so far."""


def scale_rates(multipliers: Mapping[str, optax.ScalarOrSchedule]) -> optax.GradientTransformation:
    """Multiplies the updates of the learnable scales; put it after the optimiser in a chain.

    Args:
      multipliers: name of a scale -> factor, or schedule of one; scales without one stay as they are.
        `annealed(steps)` has the defaults.

    Returns:
      A transform for trees with `SelWeight` nodes. It needs no params.

    Raises:
      ValueError: a scale's name is unknown.
    """
    check_names(multipliers)

    def init(params: Any) -> ScaleRatesState:
        del params
        return ScaleRatesState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: ScaleRatesState, params: Any = None) -> tuple[Any, ScaleRatesState]:
        del params
        now = {name: rate(state.count) if callable(rate) else rate for name, rate in multipliers.items()}
        updates = jax.tree.map(
            lambda label, update: update * jnp.asarray(now[label], update.dtype) if label in now else update,
            labels(updates),
            updates,
        )
        return updates, ScaleRatesState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def annealed(
    steps: int, outer: tuple[float, float] = (1.0, 0.1), inner: tuple[float, float] = (0.1, 1.0)
) -> dict[str, optax.ScalarOrSchedule]:
    """Multipliers after the paper: e's starts high and falls, m's starts low and rises, l and n stay.

    The output scale commits to its size (and sign) early; the curvature is refined once it has settled.

    Args:
      steps: updates over which they move, along half a cosine.
      outer: e's first and last.
      inner: m's first and last.

    Returns:
      name -> multiplier or schedule, for `scale_rates`.

    Raises:
      ValueError: steps is not positive.

    Source: arXiv:2607.09967, section 2.2, which gives no constants. For a small GPT-2 these are as good as
    three times as much, and as none (`python -m experiments sel --calibrate`): seeds differ by more.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def between(first: float, last: float) -> optax.Schedule:
        def schedule(count: Int[Array, ""]) -> Array:
            share = jnp.minimum(count, steps) / steps
            return last + (first - last) * (1 + jnp.cos(jnp.pi * share)) / 2

        return schedule

    return {"e": between(*outer), "l": 1.0, "m": between(*inner), "n": 1.0}
