"""From parameters of any layout to batches of tall matrices and back: one solver call per shape."""

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from manifold_muon.dual_ascent import Solver
from manifold_muon.manifolds import Manifold
from spectral import KERNEL, fans, from_matrices, to_matrices


def to_tall(
    x: Float[Array, "..."], dimension_numbers: MuonDimensionNumbers = KERNEL
) -> Float[Array, "batch m n"]:
    """A parameter as tall matrices (m >= n), in float32 or better.

    They are the papers' W (out, in) where fan_out >= fan_in, and W^T where it is wide.
    """
    matrices = to_matrices(x, dimension_numbers).astype(jnp.promote_types(x.dtype, jnp.float32))
    fan_in, fan_out = fans(x.shape, dimension_numbers)
    return matrices.mT if fan_out >= fan_in else matrices


def from_tall(
    tall: Float[Array, "batch m n"],
    shape: Sequence[int],
    dimension_numbers: MuonDimensionNumbers = KERNEL,
) -> Float[Array, "..."]:
    """Inverse of `to_tall`, for a parameter of this shape."""
    fan_in, fan_out = fans(shape, dimension_numbers)
    return from_matrices(tall.mT if fan_out >= fan_in else tall, shape, dimension_numbers)


def solve_stacked(
    solver: Solver,
    g: Sequence[Float[Array, "_ _ _"]],
    w: Sequence[Float[Array, "_ _ _"]],
    manifolds: Sequence[Manifold],
) -> list[Float[Array, "_ _ _"]]:
    """The solver's directions, matrices of one shape and manifold in one batched call.

    Args:
      solver: finds the directions of one batch.
      g: batches of tall gradients.
      w: batches of tall points at radius 1, of the same shapes.
      manifolds: one a batch, at radius 1.

    Returns:
      Directions, one batch for each in g.
    """
    groups = defaultdict(list)
    for index, (w_i, manifold) in enumerate(zip(w, manifolds, strict=True)):
        groups[w_i.shape[1:], manifold].append(index)
    directions: dict[int, Array] = {}
    for (_, manifold), members in groups.items():
        a = solver(
            jnp.concatenate([g[i] for i in members]), jnp.concatenate([w[i] for i in members]), manifold
        )
        start = 0
        for i in members:
            directions[i] = a[start : start + len(w[i])]
            start += len(w[i])
    return [directions[i] for i in range(len(w))]
