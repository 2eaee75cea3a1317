"""Raw weights from effective ones."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sel_jax.symexplin import SATURATION, Rule, Scales, SymExpLin

_STEPS = 7
"""Newton's: from the bound below, 4 reach float32's accuracy for r > -0.9, and 6 for r > -0.9999."""


def invert(
    weights: Float[Array, "..."], config: SymExpLin, scales: Scales | None = None, rule: Rule | None = None
) -> Float[Array, "..."]:
    """The raw weights w with `config(w, scales) == weights`, to float32's accuracy.

    With y = k |w| and t = |weights|, both branches read `exp(y) - 1 + r y = t d exp(n) / e`, where
    `r = +-l exp(n) / (beta e m)`; Newton's method runs on all weights at once, and above the saturation the
    solution is explicit.

    Args:
      weights: effective weights, of any shape and floating type.
      config: the map.
      scales: name -> factors, for the scales that are arrays.
      rule: which rule to invert; by default the map's own. `congruent` with a map whose rule is `mismatch`
        is the paper's mismatched initialisation: it makes negative weights smaller.

    Returns:
      float32, of the weights' shape. While tracing, when scales cannot be looked at, NaN where the map is
      not invertible.

    Raises:
      ValueError: the map is not invertible: e, m > 0 and `beta e m exp(-n) > |l|` must hold everywhere
        (under the congruent rule, `> -l`).
    """
    scales = dict(scales or {})
    rule = rule or config.rule
    invertible, _ = _invertible(config, rule, scales)
    if not isinstance(invertible, jax.core.Tracer) and not np.all(invertible):
        raise ValueError(
            f"the {rule} map with beta = {config.beta:g} is not invertible with these scales: e and m must "
            "be positive and beta * e * m * exp(-n) larger than l; raise beta, or scale l down"
        )
    return _invert(config, rule, weights, scales)


def _invertible(config: SymExpLin, rule: Rule, scales: Scales) -> tuple[Array | bool, Array | float]:
    """Where the map is invertible, and `beta e m exp(-n)`. Of constants both are so while tracing too."""
    e, l, m, n = (config.value(name, scales) for name in ("e", "l", "m", "n"))  # noqa: E741
    room = config.beta * e * m * _exp(-n)
    bounded = (-l < room) & ((l < room) | (rule == "congruent"))
    return (e > 0) & (m > 0) & bounded, room


# Jitted, so that without a jit around it too a shape is compiled once.
@partial(jax.jit, static_argnums=(0, 1))
def _invert(config: SymExpLin, rule: Rule, weights: Array, scales: Scales) -> Array:
    e, l, m, n = (config.value(name, scales) for name in ("e", "l", "m", "n"))  # noqa: E741
    invertible, room = _invertible(config, rule, scales)
    weights = weights.astype(jnp.float32)
    ratio = l / room
    if rule == "mismatch":
        ratio = jnp.where(weights < 0, -ratio, ratio)
    target = jnp.abs(weights) * config.beta * _exp(n) / e
    size = _solve(target, ratio) / (config.beta * m)
    return jnp.where(invertible, jnp.sign(weights) * size, jnp.nan)


def _exp(x: Array | float) -> Array | float:
    return math.exp(x) if isinstance(x, float | int) else jnp.exp(x)


def _solve(target: Array, ratio: Array | float) -> Array:
    """y >= 0 with exp(y) - 1 + ratio * y = target, for ratio > -1 and target >= 0."""
    # exp(y) - 1 >= y + y^2 / 2 bounds y from above, and from above Newton descends without overshooting.
    half = 1 + ratio
    bound = 2 * target / jnp.maximum(half + jnp.sqrt(half**2 + 2 * target), jnp.finfo(jnp.float32).tiny)
    start = jnp.minimum(bound, jnp.log1p(target + jnp.maximum(-ratio, 0) * bound))

    def newton(_: int, y: Array) -> Array:
        growth = jnp.expm1(jnp.minimum(y, SATURATION))
        return jnp.maximum(y - (growth + ratio * y - target) / jnp.maximum(growth + 1 + ratio, 1e-30), 0)

    y = jax.lax.fori_loop(0, _STEPS, newton, jnp.broadcast_to(start, target.shape))
    top, slope = math.expm1(SATURATION), math.exp(SATURATION)
    beyond = (target - top + slope * SATURATION) / (slope + ratio)
    return jnp.where(target > top + ratio * SATURATION, beyond, y)
