"""Which parameter lives on which manifold: patterns on paths, checked against the parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from optax.contrib import MuonDimensionNumbers

from manifold_muon.manifolds import DGram, Manifold, Oblique, Stiefel, Unconstrained
from spectral import KERNEL, fans
from spectral.paths import match, named_leaves, shape_of

Assignment = Mapping[str, Manifold]
"""Glob patterns on parameter paths -> manifold; the first pattern that fits a path decides."""
DimensionNumbers = MuonDimensionNumbers | Mapping[str, MuonDimensionNumbers]
"""One specification for every assigned parameter, or glob patterns on paths -> specification."""

_PAIRS: dict[str, tuple[Manifold, Manifold]] = {
    "none": (Unconstrained(), Unconstrained()),
    "stiefel": (Stiefel(), Stiefel()),
    "dgram": (DGram(), DGram()),
    "oblique": (Oblique(), Oblique()),
    "hetero": (Stiefel(), DGram()),
    "hetero-inv": (DGram(), Stiefel()),
}
ASSIGNMENTS: tuple[str, ...] = tuple(_PAIRS)


def assignment(name: str, attention: str = "*attn*/kernel", mlp: str = "*mlp*/kernel") -> dict[str, Manifold]:
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
      TypeError: a value of the assignment is not a manifold.
    """
    for pattern, manifold in assignment.items():
        if not isinstance(manifold, Manifold):
            raise TypeError(
                f"pattern {pattern!r} is assigned {manifold!r}, which is not a Manifold such as Stiefel()"
            )
    if isinstance(dimension_numbers, MuonDimensionNumbers):
        dimension_numbers = {"*": dimension_numbers}
    manifolds, dimensions = match(params, assignment), match(params, dimension_numbers)
    shapes = {name: shape_of(leaf) for name, leaf in named_leaves(params)}
    return {
        name: _assigned(name, shapes[name], manifold, dimensions.get(name))
        for name, manifold in manifolds.items()
    }


def _assigned(
    name: str, shape: tuple[int, ...], manifold: Manifold, dimension_numbers: MuonDimensionNumbers | None
) -> Assigned:
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape} and is assigned to {manifold}, which is for matrices: "
            "narrow the pattern so that it leaves this parameter out"
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
