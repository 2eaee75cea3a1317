"""Which parameter lives on which manifold: patterns on paths, checked against the parameters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from manifold_muon.manifolds import DGram, Manifold, Oblique, Stiefel, Unconstrained
from spectral import KERNEL, fans
from spectral.dimensions import DimensionNumbers
from spectral.paths import first_matches, map_named, match, named_leaves

Assignment = Mapping[str, Manifold]
"""Glob patterns on parameter paths -> manifold; the first pattern that fits a path decides."""

_PAIRS: dict[str, tuple[Manifold, Manifold]] = {
    "none": (Unconstrained(), Unconstrained()),
    "stiefel": (Stiefel(), Stiefel()),
    "dgram": (DGram(), DGram()),
    "oblique": (Oblique(), Oblique()),
    "hetero": (Stiefel(), DGram()),
    "hetero-inv": (DGram(), Stiefel()),
}
ASSIGNMENTS: tuple[str, ...] = tuple(_PAIRS)


def named_assignment(
    name: str, attention: str = "*attn*/kernel", mlp: str = "*mlp*/kernel"
) -> dict[str, Manifold]:
    """A named assignment of manifolds to attention and MLP matrices.

    Args:
      name: none, stiefel, dgram, oblique, hetero (attention on Stiefel, MLP on DGram) or hetero-inv.
      attention: glob pattern on the paths of the attention matrices.
      mlp: the same for the MLP matrices.

    Returns:
      pattern -> manifold, to be used as it is or changed.

    Source: arXiv:2606.13276, whose best assignment is hetero.
    """
    if name not in _PAIRS:
        raise ValueError(f"unknown assignment {name!r}: choose one of {', '.join(ASSIGNMENTS)}")
    return dict(zip((attention, mlp), _PAIRS[name], strict=True))


class Assigned(NamedTuple):
    """A parameter's manifold, the radius it has there, and which of its axes make up matrices."""

    manifold: Manifold
    radius: float
    dimension_numbers: MuonDimensionNumbers


def assign(
    params: Any, assignment: Assignment, dimension_numbers: DimensionNumbers = KERNEL
) -> dict[str, Assigned]:
    """The manifold of every parameter that a pattern of the assignment fits.

    Args:
      params: a pytree of (abstract) arrays.
      assignment: pattern -> manifold.
      dimension_numbers: which axes are inputs and outputs; the rest are batch axes.

    Returns:
      path -> what is assigned there; other parameters are absent.

    Raises:
      ValueError: a pattern fits no parameter, an assigned parameter has fewer than 2 axes, or the
        dimension numbers do not fit it or are not given.
      TypeError: the assignment does not map patterns to manifolds, or an assigned parameter's entries
        are not floating-point.
    """
    _require_dimension_numbers(dimension_numbers)
    if not isinstance(dimension_numbers, MuonDimensionNumbers):
        match(params, dimension_numbers, "pattern of dimension_numbers")
    return assign_part(params, assignment, dimension_numbers)


def assign_part(
    params: Any, assignment: Assignment, dimension_numbers: DimensionNumbers
) -> dict[str, Assigned]:
    """`assign` for a part of the parameters, of which the dimension numbers may name others."""
    _require_manifolds(assignment)
    _require_dimension_numbers(dimension_numbers)
    leaves = dict(named_leaves(params))
    if isinstance(dimension_numbers, MuonDimensionNumbers):
        dimensions = dict.fromkeys(leaves, dimension_numbers)
    else:
        dimensions = first_matches(leaves, dimension_numbers)
    return {
        name: _assigned(name, leaves[name], manifold, dimensions.get(name))
        for name, manifold in match(params, assignment).items()
    }


def _require_manifolds(assignment: Assignment) -> None:
    if not isinstance(assignment, Mapping):
        raise TypeError(
            f"an assignment maps patterns to manifolds, like named_assignment('hetero'); got {assignment!r}"
        )
    for pattern, manifold in assignment.items():
        if not isinstance(pattern, str):
            raise TypeError(f"an assignment's patterns are strings; got {pattern!r}")
        if not isinstance(manifold, Manifold):
            raise TypeError(
                f"pattern {pattern!r} is assigned {manifold!r}, which is not a Manifold such as Stiefel()"
            )


def _require_dimension_numbers(dimension_numbers: DimensionNumbers) -> None:
    if isinstance(dimension_numbers, MuonDimensionNumbers):
        return
    if not isinstance(dimension_numbers, Mapping) or not all(
        isinstance(value, MuonDimensionNumbers) for value in dimension_numbers.values()
    ):
        raise TypeError(
            "dimension_numbers must be an optax.contrib.MuonDimensionNumbers, or map patterns to them; "
            f"got {dimension_numbers!r}"
        )


def map_assigned(
    function: Callable[..., Any], assigned: Mapping[str, Assigned], tree: Any, *rest: Any
) -> Any:
    """`function(assigned, leaf, *others)` on the assigned leaves of tree; others stay as they are."""

    def apply(name: str, leaf: Any, *others: Any) -> Any:
        return function(assigned[name], leaf, *others) if name in assigned else leaf

    return map_named(apply, tree, *rest)


def _assigned(
    name: str, leaf: Any, manifold: Manifold, dimension_numbers: MuonDimensionNumbers | None
) -> Assigned:
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape} and is assigned to {manifold}, which is for matrices: "
            "narrow the pattern so that it leaves this parameter out"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} has {dtype} entries and is assigned to {manifold}, which needs floating-point"
        )
    if dimension_numbers is None:
        raise ValueError(
            f"no pattern of dimension_numbers fits {name} with shape {shape}, which is on {manifold}"
        )
    try:
        fan_in, fan_out = fans(shape, dimension_numbers)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    radius = manifold.scale(fan_in, fan_out)
    return Assigned(manifold.with_radius(radius), radius, dimension_numbers)
