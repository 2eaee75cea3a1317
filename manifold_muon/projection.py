"""Parameters and their manifolds: putting them there, and measuring how far off they are."""

from typing import Any

from jaxtyping import Array

from manifold_muon.assignments import Assigned, Assignment, assign, map_assigned
from manifold_muon.stacking import from_tall, to_tall
from spectral import KERNEL
from spectral.dimensions import DimensionNumbers
from spectral.paths import named_leaves


def project_params(params: Any, assignment: Assignment, dimension_numbers: DimensionNumbers = KERNEL) -> Any:
    """The parameters with every assigned matrix put on its manifold; do this once, before training.

    Also the way back for averaged weights (EMA, SWA), which leave the manifold.

    Args:
      params: a pytree of arrays.
      assignment: pattern -> manifold.
      dimension_numbers: input and output axes; the rest are batch axes.

    Returns:
      The same tree; parameters without a manifold are untouched.

    Raises:
      ValueError: as `assign`.
    """

    def project(assigned: Assigned, leaf: Array) -> Array:
        tall = assigned.manifold.project(to_tall(leaf, assigned.dimension_numbers))
        return from_tall(tall, leaf.shape, assigned.dimension_numbers).astype(leaf.dtype)

    return map_assigned(project, assign(params, assignment, dimension_numbers), params)


def constraint_violations(
    params: Any, assignment: Assignment, dimension_numbers: DimensionNumbers = KERNEL
) -> dict[str, Array]:
    """How far every assigned matrix is from its manifold.

    Args:
      params: a pytree of arrays.
      assignment: pattern -> manifold.
      dimension_numbers: input and output axes; the rest are batch axes.

    Returns:
      path -> the manifold's violation, one number for each matrix of the parameter's batch.
    """
    assigned = assign(params, assignment, dimension_numbers)
    return {
        name: assigned[name].manifold.violation(to_tall(leaf, assigned[name].dimension_numbers))
        for name, leaf in named_leaves(params)
        if name in assigned
    }
