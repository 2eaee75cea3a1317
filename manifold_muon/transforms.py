"""Manifold Muon as optax gradient transformations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array

from manifold_muon.assignments import (
    Assigned,
    Assignment,
    DimensionNumbers,
    assign,
    assign_part,
    map_assigned,
)
from manifold_muon.dual_ascent import SOLVERS, Solver
from manifold_muon.manifolds import Unconstrained
from manifold_muon.stacking import from_tall, solve_stacked, to_tall
from spectral import KERNEL
from spectral.paths import map_named, named_leaves


class ManifoldMuonState(NamedTuple):
    """Momentum b = momentum * b + g."""

    mu: optax.Updates


def scale_by_manifold_muon(
    assignment: Assignment,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    solver: str | Solver = "dual_ascent",
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Turn gradients into steep directions that are tangent to each weight's manifold.

    With b = momentum * b + g and G = g + momentum * b (b itself where nesterov is off), every matrix W gets
    the solver's approximation of the direction A of largest <G, A>, with ||A||_2 <= 1 (times the radius),
    among those tangent at W. The default solver is the paper's; `DualAscent` says what it misses. The
    weights must lie on their manifolds (`project_params`), and `retract` must stand last in the chain:

        optax.chain(scale_by_manifold_muon(a), optax.scale_by_learning_rate(0.02), retract(a))

    Args:
      assignment: glob pattern on paths -> manifold; every parameter must have one (take the others out
        with `optax.partition` or `optax.masked`, or use `manifold_muon`).
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes, whose
        matrices are treated one by one.
      momentum: decay of the momentum.
      nesterov: use the Nesterov direction.
      solver: of the tangent step: `dual_ascent`, or a `Solver` with other settings.
      mu_dtype: dtype of the momentum; None is the parameters' own.

    Returns:
      An optax gradient transformation, whose `update` needs params. Parameters in bfloat16 are accepted;
      they hold their constraint only to bfloat16's accuracy.

    Raises:
      ValueError: at init, when the assignment does not fit the parameters (see `assign`).

    Source: arXiv:2606.13276, the step of Manifold Muon.
    """
    solve = _solver(solver)

    def init(params: optax.Params) -> ManifoldMuonState:
        _assign_all(params, assignment, dimension_numbers)
        return ManifoldMuonState(optax.tree.zeros_like(params, dtype=mu_dtype))

    def update(
        updates: optax.Updates, state: ManifoldMuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ManifoldMuonState]:
        _require_params(params, "scale_by_manifold_muon")
        assigned = _assign_all(params, assignment, dimension_numbers)
        mu = jax.tree.map(lambda b, g: momentum * b + g, state.mu, updates)
        g = jax.tree.map(lambda b, g: g + momentum * b, mu, updates) if nesterov else mu
        directions = _directions(solve, g, params, assigned)
        return directions, ManifoldMuonState(optax.tree.cast_like(mu, state.mu))

    return optax.GradientTransformation(init, update)


def _directions(solve: Solver, g: Any, params: Any, assigned: dict[str, Assigned]) -> Any:
    specs = [assigned[name] for name, _ in named_leaves(params)]
    g_leaves, treedef = jax.tree.flatten(g)
    w_leaves = jax.tree.leaves(params)
    a = solve_stacked(
        solve,
        [to_tall(g_i, spec.dimension_numbers) for g_i, spec in zip(g_leaves, specs, strict=True)],
        [to_tall(w, spec.dimension_numbers) / spec.radius for w, spec in zip(w_leaves, specs, strict=True)],
        [spec.manifold.with_radius(1.0) for spec in specs],
    )
    return treedef.unflatten(
        from_tall(spec.radius * a_i, g_i.shape, spec.dimension_numbers).astype(g_i.dtype)
        for a_i, g_i, spec in zip(a, g_leaves, specs, strict=True)
    )


def retract(
    assignment: Assignment, dimension_numbers: DimensionNumbers = KERNEL
) -> optax.GradientTransformation:
    """Change updates so that the weights end on their manifolds; the last of a chain, after any optimiser.

    The update u of a weight W becomes retract(W + u) - W. Weights that were far from their manifold before
    the step (not projected at the start) may need more than one step to reach it.

    Args:
      assignment: glob pattern on paths -> manifold; other parameters' updates pass through.
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes.

    Returns:
      A stateless optax gradient transformation, whose `update` needs params. Its updates have the wider of
      the gradient's and the weight's dtype.

    Raises:
      ValueError: at init, when the assignment does not fit the parameters (see `assign`).
    """

    def init(params: optax.Params) -> optax.EmptyState:
        assign_part(params, assignment, dimension_numbers)
        return optax.EmptyState()

    def leaf(assigned: Assigned, update: Array, weight: Array) -> Array:
        dims = assigned.dimension_numbers
        moved = assigned.manifold.retract(to_tall(weight, dims) + to_tall(update, dims))
        change = from_tall(moved, weight.shape, dims) - weight
        return change.astype(jnp.promote_types(update.dtype, weight.dtype))

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        _require_params(params, "retract")
        assigned = assign_part(params, assignment, dimension_numbers)
        return map_assigned(leaf, assigned, updates, params), state

    return optax.GradientTransformation(init, update)


def manifold_muon(
    learning_rate: optax.ScalarOrSchedule,
    assignment: Assignment,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    adam_learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    solver: str | Solver = "dual_ascent",
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
      momentum, nesterov, solver, mu_dtype: see `scale_by_manifold_muon`.
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
        retract(assignment, dimension_numbers),
    )


def _assign_all(
    params: Any, assignment: Assignment, dimension_numbers: DimensionNumbers
) -> dict[str, Assigned]:
    # These params may be a part of all: the dimension numbers may name parameters that are not here.
    assigned = assign_part(params, assignment, dimension_numbers)
    for name, leaf in named_leaves(params):
        if name not in assigned:
            raise ValueError(
                f"no pattern of the assignment fits {name} with shape {jnp.shape(leaf)}: add one, or leave "
                "the parameter to another optimiser (manifold_muon, optax.partition or optax.masked)"
            )
    return assigned


def _solver(solver: str | Solver) -> Solver:
    if callable(solver):
        return solver
    if not isinstance(solver, str):
        raise TypeError(f"solver must be a name or a Solver such as DualAscent(), got {solver!r}")
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}: choose {', '.join(SOLVERS)}, or pass a Solver")
    return SOLVERS[solver]


def _require_params(params: Any, name: str) -> None:
    if params is None:
        raise ValueError(
            f"{name} moves weights on their manifolds and needs them: call update(grads, state, params)"
        )
