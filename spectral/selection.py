"""Which leaves of a tree are matrices, by glob patterns on their names, and along which axes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from spectral.dimensions import KERNEL, DimensionNumbers, axes
from spectral.paths import first_matches, match, named_leaves

Where = str | Sequence[str]
"""A glob pattern on paths, or several."""


def select_matrices(
    tree: Any, where: Where, dimension_numbers: DimensionNumbers = KERNEL
) -> dict[str, MuonDimensionNumbers]:
    """The dimension numbers of every leaf that a pattern fits.

    Args:
      tree: params of any framework, or something like them.
      where: glob patterns on the leaves' names.
      dimension_numbers: input and output axes; a mapping may also name leaves that are not here.

    Returns:
      name -> dimension numbers, in the tree's order.

    Raises:
      ValueError: a pattern fits no leaf, a leaf is no matrix, or the dimension numbers do not fit it or are
        not given.
      TypeError: `where` is neither a string nor strings, or a leaf's entries are not floating-point.
    """
    patterns = [where] if isinstance(where, str) else list(where)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"where is a glob pattern on paths, or several; got {where!r}")
    leaves = dict(named_leaves(tree))
    selected = match(tree, dict.fromkeys(patterns))
    if isinstance(dimension_numbers, MuonDimensionNumbers):
        dimensions = dict.fromkeys(selected, dimension_numbers)
    else:
        dimensions = first_matches(selected, dimension_numbers)
    for name in selected:
        _require_matrix(name, leaves[name], dimensions.get(name))
    return {name: dimensions[name] for name in selected}


def _require_matrix(name: str, leaf: Any, dimension_numbers: MuonDimensionNumbers | None) -> None:
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape} and is no matrix: narrow the pattern so that it leaves it out"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} has {dtype} entries; a spectral norm is taken of floating-point ones")
    if dimension_numbers is None:
        raise ValueError(f"no pattern of dimension_numbers fits {name} with shape {shape}")
    try:
        axes(shape, dimension_numbers)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
