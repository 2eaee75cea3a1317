"""The whole optimiser: Manifold Muon for the matrices, AdamW for the rest."""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import DTypeLike

from manifold_muon.assignments import Assignment, assign, assign_part
from manifold_muon.manifolds import Unconstrained
from manifold_muon.sharing import AxisName
from manifold_muon.solvers import Solver
from manifold_muon.transforms import retract, scale_by_manifold_muon
from spectral import KERNEL
from spectral.dimensions import DimensionNumbers
from spectral.paths import map_named


def manifold_muon(
    learning_rate: optax.ScalarOrSchedule,
    assignment: Assignment,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    adam_learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    solver: str | Solver = "gram",
    tolerance: float | None = None,
    axis_name: AxisName | None = None,
    weight_decay: float = 0.0,
    mu_dtype: DTypeLike | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
    adam_weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformation:
    """Manifold Muon for the assigned matrices, AdamW for every other parameter.

    Start from `project_params(params, assignment)`. The rate is the spectral norm of a step relative to
    the manifold's radius; the paper's is 0.02.

    Args:
      learning_rate: Muon's, a number or a schedule.
      assignment: glob pattern on paths -> manifold, such as `named_assignment("hetero")`.
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes.
      adam_learning_rate: AdamW's, a number or a schedule.
      momentum, nesterov, solver, tolerance, axis_name, mu_dtype: see `scale_by_manifold_muon`.
      weight_decay: decoupled decay of the matrices on `Unconstrained`; the manifolds bound the others.
      adam_b1, adam_b2, adam_eps: AdamW's moments.
      adam_weight_decay, adam_weight_decay_mask: AdamW's decay, and what it is applied to (a tree of
        bools or a function of params, as in `optax.adamw`).

    Returns:
      An optax gradient transformation, whose `update` needs params. `optax.inject_hyperparams` takes any
      callable for a schedule: name those that are none
      (a Solver, a dtype, a mask function) in its `static_args`.

    Raises:
      ValueError: at init, when the assignment does not fit the parameters (see `assign`).

    Source: arXiv:2606.13276.
    """

    def unconstrained(params: optax.Params) -> Any:
        assigned = assign_part(params, assignment, dimension_numbers)
        return map_named(lambda name, _: isinstance(assigned[name].manifold, Unconstrained), params)

    def labels(params: optax.Params) -> Any:
        assigned = assign(params, assignment, dimension_numbers)
        return map_named(lambda name, _: "manifold_muon" if name in assigned else "adamw", params)

    muon = optax.chain(
        scale_by_manifold_muon(
            assignment,
            dimension_numbers,
            momentum=momentum,
            nesterov=nesterov,
            solver=solver,
            tolerance=tolerance,
            axis_name=axis_name,
            mu_dtype=mu_dtype,
        ),
        optax.add_decayed_weights(weight_decay, unconstrained),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = optax.adamw(
        adam_learning_rate,
        adam_b1,
        adam_b2,
        adam_eps,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        mask=adam_weight_decay_mask,
    )
    return optax.chain(
        optax.partition({"manifold_muon": muon, "adamw": adamw}, labels),
        retract(assignment, dimension_numbers, axis_name=axis_name),
    )
