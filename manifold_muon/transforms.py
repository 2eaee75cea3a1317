"""Manifold Muon as optax gradient transformations."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array

from manifold_muon.assignments import (
    Assigned,
    Assignment,
    assign_part,
)
from manifold_muon.dual_ascent import DualAscent
from manifold_muon.gram_solver import GramSolver
from manifold_muon.manifolds import Manifold
from manifold_muon.sharing import AxisName, sharded_like
from manifold_muon.solvers import Solver
from manifold_muon.stacking import from_tall, map_stacked, to_tall
from spectral import KERNEL
from spectral.dimensions import DimensionNumbers, axes
from spectral.paths import map_named, named_leaves


class Diagnostics(NamedTuple):
    """How the last step was found: trees like params, with one number for each matrix of a parameter."""

    iterations: Any
    gap: Any
    """Relative duality gap: the step reaches at least (1 - gap) of the steepest one; NaN if not known."""


class ManifoldMuonState(NamedTuple):
    """Momentum b = momentum * b + g, and what the solver keeps."""

    mu: optax.Updates
    dual: Any
    """Warm starts of the solver, like params: `(*batch, n, n)`, or zeros `(*batch, 1, 1)` for none."""
    diagnostics: Diagnostics


def muon_states(opt_state: Any) -> list[ManifoldMuonState]:
    """Every `ManifoldMuonState` in an optimiser's state, wherever chains and partitions put it."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, ManifoldMuonState))
    return [node for node in nodes if isinstance(node, ManifoldMuonState)]


def scale_by_manifold_muon(
    assignment: Assignment,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    solver: str | Solver = "gram",
    tolerance: float | None = None,
    axis_name: AxisName | None = None,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Turn gradients into steep directions that are tangent to each weight's manifold.

    With b = momentum * b + g and G = g + momentum * b (b itself where nesterov is off), every matrix W gets
    the direction A of largest <G, A>, to the solver's tolerance, with ||A||_2 <= 1 (times the radius), among
    those tangent at W. The weights must lie on their manifolds (`project_params`), and `retract` must stand
    last in the chain:

        optax.chain(scale_by_manifold_muon(a), optax.scale_by_learning_rate(0.02), retract(a))

    Args:
      assignment: glob pattern on paths -> manifold; every parameter must have one (take the others out
        with `optax.partition` or `optax.masked`, or use `manifold_muon`).
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes, whose
        matrices are treated one by one.
      momentum: decay of the momentum.
      nesterov: use the Nesterov direction.
      solver: of the tangent step: `gram` (exact to a tolerance), `dual_ascent` (the paper's), or a `Solver`
        with other settings, such as `GramSolver(max_iterations=...)`.
      tolerance: of the gram solver, the relative duality gap at which a matrix is done; None is 1e-2.
      axis_name: a mapped axis (`pmap`, `shard_map`) over which parameters are replicated and the solver's
        work is to be shared. Under `jit` it is shared over the parameters' mesh, if they live on one.
      mu_dtype: dtype of the momentum; None is the parameters' own.

    Returns:
      An optax gradient transformation, whose `update` needs params. Parameters in bfloat16 are accepted;
      they hold their constraint only to bfloat16's accuracy.

    Raises:
      ValueError: at init, when the assignment does not fit the parameters (see `assign`).

    Source: arXiv:2606.13276, the step of Manifold Muon.
    """
    solve = _solver(solver, tolerance)

    def init(params: optax.Params) -> ManifoldMuonState:
        assigned = _assign_all(params, assignment, dimension_numbers)
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)

        def dual(name: str, leaf: Array) -> Array:
            start = _first_dual(solve, leaf, assigned[name])
            # Not an empty array, which Orbax refuses to save.
            return jnp.zeros((*_tall_shape(leaf, assigned[name])[:-2], 1, 1)) if start is None else start

        def per_matrix(value: float, dtype: DTypeLike) -> Any:
            return map_named(
                lambda name, leaf: jnp.full(_tall_shape(leaf, assigned[name])[:-2], value, dtype), params
            )

        diagnostics = Diagnostics(per_matrix(0, jnp.int32), per_matrix(jnp.nan, jnp.float32))
        return ManifoldMuonState(mu, map_named(dual, params), diagnostics)

    def update(
        updates: optax.Updates, state: ManifoldMuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ManifoldMuonState]:
        _require_params(params, "scale_by_manifold_muon")
        assigned = _assign_all(params, assignment, dimension_numbers)
        mu = jax.tree.map(lambda b, g: momentum * b + g, state.mu, updates)
        g = jax.tree.map(lambda b, g: g + momentum * b, mu, updates) if nesterov else mu
        directions, dual, diagnostics = _solve(solve, g, params, state, assigned, axis_name)
        return directions, ManifoldMuonState(optax.tree.cast_like(mu, state.mu), dual, diagnostics)

    return optax.GradientTransformation(init, update)


def _tall_shape(leaf: Array, assigned: Assigned) -> tuple[int, ...]:
    """(*batch, m, n) of a parameter's tall matrices, with its batch axes as they are."""
    batch, _, _ = axes(jnp.shape(leaf), assigned.dimension_numbers)
    tall = jax.eval_shape(lambda x: to_tall(x, assigned.dimension_numbers), leaf)
    return (*(jnp.shape(leaf)[axis] for axis in batch), *tall.shape[1:])


def _first_dual(solve: Solver, leaf: Array, assigned: Assigned) -> Array | None:
    return solve.init(_tall_shape(leaf, assigned), assigned.manifold.with_radius(1.0))


def _solve(
    solve: Solver,
    g: Any,
    params: Any,
    state: ManifoldMuonState,
    assigned: dict[str, Assigned],
    axis_name: AxisName | None,
) -> tuple[Any, Any, Diagnostics]:
    """Directions, duals and diagnostics."""
    specs = [assigned[name] for name, _ in named_leaves(params)]
    g_leaves, treedef = jax.tree.flatten(g)
    w_leaves, duals, iterations, gaps = (
        jax.tree.leaves(tree) for tree in (params, state.dual, *state.diagnostics)
    )
    warm = [_first_dual(solve, w, spec) is not None for w, spec in zip(w_leaves, specs, strict=True)]
    solutions = map_stacked(
        lambda manifold, g, w, dual=None: solve(g, w, manifold, dual),
        [spec.manifold.with_radius(1.0) for spec in specs],
        [to_tall(x, spec.dimension_numbers) for x, spec in zip(g_leaves, specs, strict=True)],
        [to_tall(w, spec.dimension_numbers) / spec.radius for w, spec in zip(w_leaves, specs, strict=True)],
        [_as_stack(dual) if kept else None for dual, kept in zip(duals, warm, strict=True)],
        axis_name=axis_name,
    )

    def like(new: list[Array], old: list[Array]) -> Any:
        pairs = zip(new, old, strict=True)
        return jax.tree.unflatten(
            treedef, [sharded_like(x.reshape(y.shape).astype(y.dtype), y) for x, y in pairs]
        )

    directions = [
        from_tall(spec.radius * solution.direction, g_i.shape, spec.dimension_numbers)
        for solution, g_i, spec in zip(solutions, g_leaves, specs, strict=True)
    ]
    new_duals = [x.dual if kept else dual for x, dual, kept in zip(solutions, duals, warm, strict=True)]
    diagnostics = Diagnostics(
        like([x.iterations for x in solutions], iterations), like([x.gap for x in solutions], gaps)
    )
    return like(directions, g_leaves), like(new_duals, duals), diagnostics


def _as_stack(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-2:])


def retract(
    assignment: Assignment,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformation:
    """Change updates so that the weights end on their manifolds; the last of a chain, after any optimiser.

    The update u of a weight W becomes retract(W + u) - W. Weights that were far from their manifold before
    the step (not projected at the start) may need more than one step to reach it.

    Args:
      assignment: glob pattern on paths -> manifold; other parameters' updates pass through.
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes.
      axis_name: as in `scale_by_manifold_muon`.

    Returns:
      A stateless optax gradient transformation, whose `update` needs params. Its updates have the wider of
      the gradient's and the weight's dtype.

    Raises:
      ValueError: at init, when the assignment does not fit the parameters (see `assign`).
    """

    def init(params: optax.Params) -> optax.EmptyState:
        assign_part(params, assignment, dimension_numbers)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        _require_params(params, "retract")
        assigned = assign_part(params, assignment, dimension_numbers)
        leaves: dict[str, tuple[Array, Array]] = {}
        map_named(lambda name, *pair: leaves.setdefault(name, pair), updates, params)
        specs = assigned.values()
        pairs = [(*leaves[name], spec.dimension_numbers) for name, spec in assigned.items()]
        tall = [to_tall(update, sides) + to_tall(weight, sides) for update, weight, sides in pairs]
        stacks = map_stacked(_retract_stack, [spec.manifold for spec in specs], tall, axis_name=axis_name)
        moved = dict(zip(assigned, stacks, strict=True))

        def change(name: str, update: Array, weight: Array) -> Array:
            if name not in assigned:
                return update
            new = from_tall(moved[name], weight.shape, assigned[name].dimension_numbers)
            difference = sharded_like(new, weight) - weight
            return difference.astype(jnp.promote_types(update.dtype, weight.dtype))

        return map_named(change, updates, params), state

    return optax.GradientTransformation(init, update)


def _retract_stack(manifold: Manifold, w: Array) -> Array:
    return manifold.retract(w)


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


def _solver(solver: str | Solver, tolerance: float | None) -> Solver:
    if tolerance is not None and solver != "gram":
        raise ValueError(f"tolerance is for solver='gram'; give {solver!r} its own settings instead")
    if solver == "gram":
        return GramSolver() if tolerance is None else GramSolver(tolerance=tolerance)
    if solver == "dual_ascent":
        return DualAscent()
    if isinstance(solver, str):
        raise ValueError(f"unknown solver {solver!r}: choose gram or dual_ascent, or pass a Solver")
    if not callable(solver):
        raise TypeError(f"solver must be a name or a Solver such as GramSolver(), got {solver!r}")
    return solver


def _require_params(params: Any, name: str) -> None:
    if params is None:
        raise ValueError(
            f"{name} moves weights on their manifolds and needs them: call update(grads, state, params)"
        )
