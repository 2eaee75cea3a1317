"""From parameters of any layout to batches of tall matrices and back: one solver call per shape."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from manifold_muon.sharing import AxisName, over_devices, replicated
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


def map_stacked(
    function: Callable[..., Any],
    keys: Sequence[Hashable],
    first: Sequence[Float[Array, "_ ..."]],
    *others: Sequence[Float[Array, "_ ..."] | None],
    axis_name: AxisName | None = None,
) -> list[Any]:
    """`function(key, *members)`, where members of one shape and key are stacked into one batched call.

    Args:
      function: of a key and one stack for each column; gives a pytree of stacks.
      keys: one a member.
      first: one batch (batch, ...) a member.
      others: as `first`, with a member's batches of one size. None means that there is no such argument for
        all of that member's group.
      axis_name: see `over_devices`.

    Returns:
      The results, one a member.
    """
    groups = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key, first[index].shape[1:]].append(index)
    results: list[Any] = [None] * len(keys)
    for (key, _), members in groups.items():
        rows = ([column[i] for i in members] for column in (first, *others))
        given = ([replicated(x) for x in row if x is not None] for row in rows)
        stacks = [jnp.concatenate(row) for row in given if row]
        result = over_devices(lambda *stacks, key=key: function(key, *stacks), *stacks, axis_name=axis_name)
        start = 0
        for i in members:
            size = len(first[i])
            results[i] = jax.tree.map(lambda x, start=start, size=size: x[start : start + size], result)
            start += size
    return results
