"""Spectral norms of matrices that change from step to step, from vectors that are kept between the steps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from spectral.dimensions import axes

# Share of a fixed vector that every step adds to the kept one. It leads back to matrices that the kept one
# is orthogonal to, at a price below the tolerance: its square, of the norm before the iteration.
_FRESH = 0.01


class TrackedNorm(NamedTuple):
    """Of one parameter: arrays with as many axes."""

    norm: Float[Array, "..."]
    """One a matrix: input and output axes have size 1."""
    vector: Float[Array, "..."]
    """Singular vectors' estimates on the side of the inputs: output axes have size 1."""


def first_norm(leaf: Float[Array, "..."], dimension_numbers: MuonDimensionNumbers) -> TrackedNorm:
    """Zeros, from which `track` starts: it adds its fixed vector to them."""
    batch, inputs, _ = axes(leaf.shape, dimension_numbers)
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)

    def zeros(kept: tuple[int, ...]) -> Array:
        return jnp.zeros([size if axis in kept else 1 for axis, size in enumerate(leaf.shape)], dtype)

    return TrackedNorm(norm=zeros(batch), vector=zeros(batch + inputs))


def track(
    kernels: Sequence[Float[Array, "..."]],
    vectors: Sequence[Float[Array, "..."]],
    dimension_numbers: Sequence[MuonDimensionNumbers],
    tolerance: float,
    max_iterations: int,
) -> tuple[list[TrackedNorm], Array]:
    """Spectral norms by power iteration from the last step's vectors: lower bounds.

    An iteration takes u, on the side of the inputs and with ||u|| = 1, to v = K^T u / ||K^T u|| and on to
    K v / ||K v||. The norm is ||K v|| >= ||K^T u||, and what is between the two is how much half an
    iteration still gained: all matrices are iterated until none gains more than the tolerance.

    Args:
      kernels: parameters or their updates, of any dtype, size and layout on devices.
      vectors: of the last step, or `first_norm`'s.
      dimension_numbers: one a kernel.
      tolerance: relative gain at which a matrix is done.
      max_iterations: most iterations; the first is always made.

    Returns:
      The norms and vectors, in float32 or better (a zero matrix has norm 0), and the number of iterations.
    """
    # Products are written as sums over axes: they keep full precision on every device without being asked,
    # any layout of the axes over a mesh, and read the kernel from memory once, as a product would.
    sides = [axes(x.shape, spec)[1:] for x, spec in zip(kernels, dimension_numbers, strict=True)]
    work = [x.astype(u.dtype) for x, u in zip(kernels, vectors, strict=True)]

    def iterate(vectors: Sequence[Array]) -> list[tuple[Array, Array, Array]]:
        results = []
        for kernel, u, (inputs, outputs) in zip(work, vectors, sides, strict=True):
            back, v = _norm_and_unit(jnp.sum(kernel * u, inputs, keepdims=True), outputs)
            norm, u = _norm_and_unit(jnp.sum(kernel * v, outputs, keepdims=True), inputs)
            # The first is at most the second, up to rounding.
            results.append((norm, u, back < (1 - tolerance) * norm))
        return results

    def any_gains(results: list) -> Array:
        return jnp.any(jnp.stack([jnp.any(gains) for _, _, gains in results]))

    def unfinished(carry: tuple[Array, list]) -> Array:
        count, results = carry
        return (count < max_iterations) & any_gains(results)

    def body(carry: tuple[Array, list]) -> tuple[Array, list]:
        count, results = carry
        return count + 1, iterate([u for _, u, _ in results])

    starts = [_start(u, inputs) for u, (inputs, _) in zip(vectors, sides, strict=True)]
    # The first outside of the loop: its results are laid out over a mesh like those of all others.
    count, results = jnp.asarray(1, jnp.int32), iterate(starts)
    if results:
        # In a shard_map that gives every device matrices of its own, each has a count of its own.
        count = jnp.where(any_gains(results), count, count)
        count, results = jax.lax.while_loop(unfinished, body, (count, results))
    found = [
        TrackedNorm(norm, laid_out_like(u, old)) for (norm, u, _), old in zip(results, vectors, strict=True)
    ]
    return found, count


def _start(u: Array, inputs: tuple[int, ...]) -> Array:
    shape = [size if axis in inputs else 1 for axis, size in enumerate(u.shape)]
    # Drawn while tracing: a generator in the program would take longer to compile than all the rest. Not a
    # constant vector, which is orthogonal to updates whose columns sum to zero.
    fresh = np.random.default_rng(0).normal(size=shape)
    fresh *= _FRESH / np.linalg.norm(fresh)
    # Nor does a step with NaN or infinite entries spoil the next ones.
    return _norm_and_unit(jnp.where(jnp.isfinite(u), u, 0) + fresh.astype(u.dtype), inputs)[1]


def _norm_and_unit(x: Array, along: tuple[int, ...]) -> tuple[Array, Array]:
    """2-norms along axes, and the unit vectors: zero for zero vectors; at any scale, with no NaN."""
    largest = jnp.max(jnp.abs(x), axis=along, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(x * x, axis=along, keepdims=True))
    return largest * norm, x / jnp.where(norm > 0, norm, 1)


def laid_out_like(x: Array, other: Array) -> Array:
    """x laid out like another array of its shape, where that is part of its type: a scan's carry keeps it."""
    sharding = jax.typeof(other).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, sharding)
