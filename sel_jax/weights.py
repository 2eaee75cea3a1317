"""A reparametrised weight as a pytree node: raw weights, scales, and what may be added to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from sel_jax.inverse import invert
from sel_jax.symexplin import Factors, SymExpLin
from spectral.dimensions import axes, from_matrices

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelWeight:
    """Takes an array's place in a tree of parameters; optimisers and checkpoints see its arrays as leaves.

    Attributes:
      raw: what the map is applied to, of the weight's shape, float32.
      scales: name -> factors of the learnable scales: for matrices one along the inputs and one along the
        outputs (of length 1 on the other's axes), for vectors a single one of length 1 (without axes for
        a scalar).
      residual: matrices whose product is added: `b` (batch axes, fan_in, rank) and `a` (batch axes, rank,
        fan_out); None without.
      anchor: `weight` W0 and `raw` u0, which are not trained: the effective weight is W0 + f(u) - f0(u0),
        with f0 the map with its starting scales, and to the bit W0 at the start; None without.
      config: the map f.
      dimensions: input and output axes of matrices, counted from the last; None for vectors, whose last
        axis is theirs. All other axes are batch axes.
      dtype: name of the effective weight's.
    """

    raw: Array
    scales: Mapping[str, Factors]
    residual: Mapping[str, Array] | None
    anchor: Mapping[str, Array] | None
    config: SymExpLin = field(metadata=_STATIC)
    dimensions: MuonDimensionNumbers | None = field(metadata=_STATIC)
    dtype: str = field(metadata=_STATIC)

    def effective(self) -> Array:
        """The weight itself, of the ordinary shape and dtype."""
        weight = self.config(self.raw, self.scales)
        if self.anchor is not None:
            anchor = jax.lax.stop_gradient(self.anchor)
            moved = anchor["weight"] + (weight - self.config(anchor["raw"]))
            weight = _pinned(self._unmoved(self.anchor["raw"]), anchor["weight"], moved)
        if self.residual is not None:
            weight += self._product(self.residual)
        return weight.astype(self.dtype)

    def with_effective(self, weight: Array) -> "SelWeight":
        """The node, with the same scales and residual, whose effective weight is the given one.

        Raises:
          ValueError: the shapes differ, or the map is not invertible (see `invert`).
        """
        if weight.shape != self.raw.shape:
            raise ValueError(f"a weight of shape {weight.shape} does not fit raw weights {self.raw.shape}")
        weight = weight.astype(jnp.float32)
        if self.residual is not None:
            weight -= self._product(self.residual)
        if self.anchor is not None:
            weight += self.config(self.anchor["raw"]) - self.anchor["weight"]
        return replace(self, raw=invert(weight, self.config, self.scales))

    def _unmoved(self, raw: Array) -> Array:
        """Where neither the raw weight nor a scale has left its start."""
        unmoved = self.raw == raw
        for name, factors in self.scales.items():
            for factor, start in zip(factors, start_factors(self.config, name, len(factors)), strict=True):
                unmoved &= factor == start
        return unmoved

    def _product(self, residual: Mapping[str, Array]) -> Array:
        assert self.dimensions is not None, "only matrices have a residual"
        matrices = jnp.matmul(residual["b"], residual["a"], precision="highest")
        matrices = matrices.reshape(-1, *matrices.shape[-2:])
        return from_matrices(matrices, self.raw.shape, self.dimensions)


@jax.custom_jvp
def _pinned(unmoved: Array, start: Array, moved: Array) -> Array:
    """`start` where unmoved, which `moved` is there but for rounding; the derivative is that of `moved`."""
    return jnp.where(unmoved, start, moved)


_pinned.defjvp(lambda primals, tangents: (_pinned(*primals), tangents[2]))


def start_factors(config: SymExpLin, name: str, count: int) -> tuple[float, ...]:
    """What a scale's factors start at: the map's constant, then ones.

    An offset of 0 is 0 times 1 and not 0 times 0, or neither factor would get a gradient.
    """
    return (getattr(config, name), *[1.0] * (count - 1))


def scale_shapes(shape: tuple[int, ...], dimensions: MuonDimensionNumbers | None) -> list[tuple[int, ...]]:
    """Shapes of a scale's factors: along the inputs and along the outputs, or a vector's only one."""
    if dimensions is None:
        return [(*shape[:-1], 1)[: len(shape)]]
    _, inputs, outputs = axes(shape, dimensions)
    return [
        tuple(1 if axis in others else size for axis, size in enumerate(shape))
        for others in (outputs, inputs)
    ]
