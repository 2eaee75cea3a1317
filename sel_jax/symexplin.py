"""The map from raw to effective weights: a symmetric exponential and a linear path.

    E(a) = (e / d) (exp(k a - n) - exp(-n)),  L(w) = (l / d) w,  k = beta m,  d = beta,  a = |w|

    congruent:  sign(w) E(|w|) + L(w)
    mismatch:   sign(w) (E(|w|) + L(w)), which for a negative w is -E(|w|) + (l / d) |w|

With e = l = m = 1 and n = 0, small weights keep about their size (slope 1 + 1 / beta, and 1 - 1 / beta for
negative ones under the mismatch rule), and an additive step at a large weight is one in proportion to it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Rule = Literal["mismatch", "congruent"]
RULES: tuple[Rule, ...] = get_args(Rule)
SCALES = ("e", "l", "m", "n")
"""Names of the scales: of the exponential path, of the linear path, of its exponent, and the offset."""
SATURATION = 40.0
"""Exponents `k |w|` above this continue linearly: exp(40) is far from overflow, squared by Adam too."""

Factors = tuple[Float[Array, "..."], ...]
"""A scale as arrays that broadcast against the weights; their product is the scale."""
Scales = Mapping[str, Factors]


@dataclass(frozen=True)
class SymExpLin:
    """A map from raw weights to effective ones, elementwise: `SymExpLin(beta=4.0)(w)`.

    Attributes:
      beta: curvature; `beta * |w|` of order one at typical weights makes the exponential path felt.
      rule: how the paths are combined (see the module).
      e, l, m, n: the scales where no array of them is given.

    Raises:
      ValueError: beta is not positive and finite, or the rule is unknown.

    Source: arXiv:2607.09967, section 2.1, with both paths divided by beta so that the slope at 0 is near 1.
    """

    beta: float
    rule: Rule = "mismatch"
    e: float = 1.0
    l: float = 1.0  # noqa: E741
    m: float = 1.0
    n: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta must be positive and finite, got {self.beta}")
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}: choose one of {', '.join(RULES)}")

    def __call__(self, w: Float[Array, "..."], scales: Scales | None = None) -> Float[Array, "..."]:
        """Effective weights, computed in float32.

        The derivative at w = 0 is the mean of both branches' (autodiff through `sign` would give 0 there, and
        a bias that starts at 0 would stay). Nothing but the arguments is kept for the backward pass.

        Args:
          w: raw weights, of any shape and floating type.
          scales: name -> factors, for the scales that are arrays.

        Returns:
          float32, of w's shape.

        Raises:
          ValueError: a scale's name is unknown.
        """
        check_names(scales := scales or {})
        # Cast here, outside of the custom derivative, so that each factor's has the factor's own type.
        scales = {name: tuple(x.astype(jnp.float32) for x in scales[name]) for name in scales}
        return _effective(self, w.astype(jnp.float32), scales)

    def value(self, name: str, scales: Scales) -> Array | float:
        """A scale: the product of its factors, or the constant."""
        return math.prod(scales[name][1:], start=scales[name][0]) if name in scales else getattr(self, name)


def check_names(names: Sequence[str] | Mapping[str, object]) -> None:
    """Raises a ValueError if one of the names is no scale's."""
    if unknown := [name for name in names if name not in SCALES]:
        raise ValueError(f"unknown scales {', '.join(map(repr, unknown))}: choose among {', '.join(SCALES)}")


class _Parts(NamedTuple):
    """What the map and its derivatives are made of, all of the weights' shape (or scalars)."""

    sign: Array
    size: Array
    offset: Array | float
    """exp(-n)."""
    growth: Array
    """exp(x) - 1 at x = k |w|, continued linearly above the saturation."""
    slope: Array
    """Its derivative."""


def _parts(config: SymExpLin, w: Array, scales: Scales) -> _Parts:
    size = jnp.abs(w)
    exponent = config.beta * config.value("m", scales) * size
    bounded = jnp.minimum(exponent, SATURATION)
    # exp(x) - 1 would lose a tenth of a small weight to cancellation.
    growth = jnp.expm1(bounded)
    beyond = math.exp(SATURATION) * (exponent - bounded)
    offset = config.value("n", scales)
    offset = math.exp(-offset) if isinstance(offset, float | int) else jnp.exp(-offset)
    return _Parts(jnp.sign(w), size, offset, growth + beyond, growth + 1)


def _linear(config: SymExpLin, w: Array, parts: _Parts) -> Array:
    """What the linear path multiplies with l / d."""
    return parts.size if config.rule == "mismatch" else w


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _effective(config: SymExpLin, w: Array, scales: dict[str, Factors]) -> Array:
    parts = _parts(config, w, scales)
    outer = config.value("e", scales) * parts.offset / config.beta
    linear = config.value("l", scales) / config.beta
    return parts.sign * (outer * parts.growth) + linear * _linear(config, w, parts)


def _forward(config: SymExpLin, w: Array, scales: dict[str, Factors]) -> tuple[Array, tuple]:
    return _effective(config, w, scales), (w, scales)


def _backward(config: SymExpLin, kept: tuple, cotangent: Array) -> tuple[Array, dict[str, Factors]]:
    # Behind barriers the exponentials are computed anew: XLA would else keep the forward pass's until here.
    (w, scales), cotangent = jax.lax.optimization_barrier((kept, cotangent))
    parts = _parts(config, w, scales)
    e, l, m = (config.value(name, scales) for name in ("e", "l", "m"))  # noqa: E741
    # sign(0) = 0: at w = 0 the linear path's two slopes under the mismatch rule cancel, as in the mean.
    linear = l / config.beta * (parts.sign if config.rule == "mismatch" else 1)
    by_w = cotangent * (e * m * parts.offset * parts.slope + linear)
    if not scales:
        return by_w, {}
    (w, scales, cotangent), by_w = jax.lax.optimization_barrier(((w, scales, cotangent), by_w))
    return by_w, _by_factors(config, w, scales, cotangent)


def _by_factors(
    config: SymExpLin, w: Array, scales: dict[str, Factors], cotangent: Array
) -> dict[str, Factors]:
    """The derivative by each factor of a scale, summed to the factor's shape.

    All sums over the same axes are one reduction, which reads its operands once.
    """
    waiting = _waiting_for(cotangent, {name: scales[name] for name in scales if name in "mn"})
    parts, e = _parts(config, w, waiting), config.value("e", scales)
    signed = cotangent * parts.sign * parts.offset
    exponential = signed * parts.growth / config.beta
    terms = {
        "e": exponential,
        "l": cotangent * _linear(config, w, parts) / config.beta,
        "m": signed * e * parts.slope * parts.size,
        "n": -e * exponential,
    }
    sums: dict[tuple[str, int], Array] = {}
    for axes, factors in _by_axes(w.shape, scales).items():
        summands = tuple(terms[name] * _others(scales[name], i) for name, i in factors)
        sums |= zip(factors, _sums(summands, axes), strict=True)
    return {name: tuple(sums[name, i] for i in range(len(factors))) for name, factors in scales.items()}


def _waiting_for(cotangent: Array, scales: dict[str, Factors]) -> dict[str, Factors]:
    """The same scales, but XLA cannot compute their exponentials before the cotangent is there.

    No barrier is left when XLA orders its computations, and they would be in memory during the model's whole
    backward pass. An array that an Explicit mesh shards cannot be cut to one entry, and goes without.
    """
    if any(axis is not None for axis in jax.typeof(cotangent).sharding.spec):
        return scales
    zero = 0 * cotangent[(slice(0, 1),) * cotangent.ndim]
    return {name: (factors[0] + zero, *factors[1:]) for name, factors in scales.items()}


def _by_axes(
    shape: tuple[int, ...], scales: dict[str, Factors]
) -> dict[tuple[int, ...], list[tuple[str, int]]]:
    """Axes that are summed over -> factors, as (scale, number): one reduction gives all of them."""
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, factors in scales.items():
        for i, factor in enumerate(factors):
            axes = tuple(axis for axis, size in enumerate(shape) if factor.shape[axis] < size)
            groups.setdefault(axes, []).append((name, i))
    return groups


def _others(factors: Factors, i: int) -> Array | float:
    """The product of a scale's factors but one."""
    return math.prod(factors[:i] + factors[i + 1 :], start=1.0)


def _sums(arrays: tuple[Array, ...], axes: tuple[int, ...]) -> tuple[Array, ...]:
    if not axes:
        return arrays
    zeros = (jnp.zeros((), arrays[0].dtype),) * len(arrays)
    sums = jax.lax.reduce(
        arrays, zeros, lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True)), axes
    )
    return tuple(jnp.expand_dims(x, axes) for x in sums)


_effective.defvjp(_forward, _backward)
