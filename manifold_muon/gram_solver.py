"""The default solver of the tangent step: reweighted least squares on the dual, in n x n Gram space."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from manifold_muon.anderson import Anderson
from manifold_muon.gram_problem import Evaluation, Problem, direction, evaluate, reweighted_step
from manifold_muon.inverse_roots import Backend, Eigh, Products, Svd
from manifold_muon.manifolds import Manifold, Stiefel, Unconstrained
from manifold_muon.solvers import Solution
from manifold_muon.unit_ball import gaussian_like
from spectral import msign
from spectral.matrix_functions import unit
from spectral.products import symmetric_part

Method = Literal["auto", "eigh", "products", "svd"]

_MEMORY = 4
_RELAXATION = 1.5
"""Of the reweighted step, which minimises a bound that bends more than the dual does, and so is too short."""
_FIRST_LEVEL = 1e-2
_FINER = 3.0
"""The damping follows the gap down in steps of at least this factor."""
_MARGIN = 0.95
_TIGHT = 5e-3
"""Below this tolerance the rounding of a Gram matrix shows in the direction."""
_MUON_STEPS = 6
"""Of an unconstrained matrix sign, for 0.99 of the nuclear norm on real spectra (see `msign`)."""
_NEGLIGIBLE = 1e-3
"""An optimum below this share of n times g's RMS singular value counts as zero."""


@dataclass(frozen=True)
class GramSolver:
    """The direction A of `max_A <G, A>`, `||A||_2 <= 1`, `P(A^T W + W^T A) = 0`, to a relative gap.

    The dual, `min_L ||G + 2 W L||_*` over L = P(L), is solved by iteratively reweighted least squares with
    Anderson acceleration. All of it happens on n x n matrices, so that m costs nothing but the first and
    last products, and is invariant to G's scale. It stops when

        1 - <G, A> / ||G + 2 W L||_* <= tolerance

    for the best feasible A and the lowest upper bound so far. A is the damped matrix sign
    M (M^T M + eps^2 I)^{-1/2} of M = G + 2 W L, made tangent and scaled into the unit ball: damped, since M
    is often singular (LayerNorm makes the all-ones vector a null direction of G) and the sign of a null
    direction is noise that the projection would pay for. It stops as well where the gap is down to what the
    damping costs, which cannot be finer than the rounding of M^T M: at n = 768, on singular values i^-1 to
    i^-1.5 and those of a model's first steps, 1 to 5 % by `products` and 0.5 to 1.6 % by `eigh`.

    On a square Stiefel W, and with no constraint, L is known in closed form: no iterations. A square DGram W
    is the hard case: the optimal M is singular, and in GPT-2's training a gap of 4e-2 is left at the cap.
    """

    tolerance: float = 1e-2
    """Relative duality gap at which a matrix is done."""
    max_iterations: int = 16
    """Iterations after which the best direction so far is taken."""
    early_stopping: bool = True
    """Stop at the tolerance (`while_loop`). If not, all of `max_iterations` are made (`fori_loop`), which
    reverse-mode differentiation and a step of constant cost need."""
    method: Method = "auto"
    """How roots are taken: `eigh` of the Gram matrix or `svd` of M (both one matrix after the other),
    `products` (matrix products alone, batched), or `auto`. That is `products` on GPUs and TPUs and `eigh`, in
    float64, on CPUs; but `svd` everywhere below a tolerance of 5e-3. Decompositions have no useful derivative
    at repeated singular values."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a relative gap between 0 and 1, got {self.tolerance}")
        if self.max_iterations < 0:
            raise ValueError(f"max_iterations must not be negative, got {self.max_iterations}")
        if self.method not in get_args(Method):
            raise ValueError(f"unknown method {self.method!r}: choose {', '.join(get_args(Method))}")

    def init(self, shape: tuple[int, ...], manifold: Manifold) -> Float[Array, "*batch n n"] | None:
        """Zeros, which stand for no warm start; None where the dual is known in closed form."""
        if _closed_form(shape, manifold):
            return None
        return jnp.zeros((*shape[:-2], shape[-1], shape[-1]), jnp.float32)

    @partial(jax.jit, static_argnames=("self", "manifold"))
    def __call__(
        self,
        g: Float[Array, "*batch m n"],
        w: Float[Array, "*batch m n"],
        manifold: Manifold,
        dual: Float[Array, "*batch n n"] | None = None,
    ) -> Solution:
        """The direction for each matrix of the batch.

        Args:
          g: gradients or momenta, tall (m >= n), at any scale.
          w: points of the manifold at radius 1, of the same shape.
          manifold: which constraint.
          dual: the last solution's, for a warm start; zeros or None start cold.

        Returns:
          The solution. Each matrix is solved on its own, whatever else is in the batch.
        """
        batch, (m, n) = g.shape[:-2], g.shape[-2:]
        if isinstance(manifold, Unconstrained):
            return _plain_muon(g, _MUON_STEPS if self.tolerance >= _TIGHT else None)
        if dual is None:
            dual = jnp.zeros((*batch, n, n), g.dtype) + 0 * g[..., :n, :]
        flat = (g.reshape(-1, m, n), w.reshape(-1, m, n), dual.astype(g.dtype).reshape(-1, n, n))

        def by(backend: Backend | Svd, one_by_one: bool = True) -> Solution:
            solve = partial(self._solve, manifold=manifold, backend=backend)
            if one_by_one:
                return jax.lax.map(lambda arguments: solve(*arguments), flat)
            return jax.vmap(solve)(*flat)

        ways = {
            "eigh": partial(by, Eigh()),
            "products": partial(by, Products(), one_by_one=False),
            "svd": partial(by, Svd()),
        }
        if self.method != "auto":
            solution = ways[self.method]()
        elif self.tolerance < _TIGHT:
            solution = ways["svd"]()
        else:
            solution = jax.lax.platform_dependent(cpu=ways["eigh"], default=ways["products"])
        solution = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), solution)
        return solution._replace(dual=None) if _closed_form(g.shape, manifold) else solution

    def _solve(
        self,
        g: Float[Array, "m n"],
        w: Float[Array, "m n"],
        dual: Array,
        manifold: Manifold,
        backend: Backend | Svd,
    ) -> Solution:
        """One matrix."""
        with jax.named_scope("gram"):
            problem = Problem.create(_normalized(g), w, manifold)
        closed_form = _closed_form(problem.g.shape, manifold)
        search = self._search(problem, manifold, backend, dual, closed_form)
        with jax.named_scope("direction"):
            a = direction(problem, manifold, backend, search.best)
        # Of the direction as it is: rounding in Gram space may have flattered the search.
        gap = search.gap_of(jnp.sum(problem.g * a))
        return Solution(a, search.at.dual, search.iterations, gap)

    def _search(
        self, problem: Problem, manifold: Manifold, backend: Backend | Svd, dual: Array, closed_form: bool
    ) -> "_Search":
        cold = problem.first_dual(manifold)
        if not closed_form:
            warm = manifold.project_symmetric(symmetric_part(dual))
            cold = jnp.where(jnp.any(dual != 0), warm, cold)
        level = jnp.asarray(self.tolerance if closed_form else max(self.tolerance, _FIRST_LEVEL), cold.dtype)
        evaluate_at = partial(evaluate, problem, manifold, backend)
        vector = gaussian_like(cold[0], seed=0)
        start = _Search.start(jax.eval_shape(evaluate_at, cold, level, vector), cold, vector, level)
        advance = partial(self._advance, problem, manifold, backend)
        if closed_form or self.max_iterations == 0:
            return start.moved(evaluate_at(cold, 2 * level, vector), start.memory, level)
        if not self.early_stopping:
            return jax.lax.fori_loop(0, 1 + self.max_iterations, lambda _, search: advance(search), start)

        def unfinished(search: _Search) -> Array:
            # A margin, as the direction in full space may turn out a little longer than in Gram space.
            inexact = search.gap > _MARGIN * self.tolerance
            hopeless = search.stuck & (search.level <= self.tolerance)
            return (search.iterations < self.max_iterations) & inexact & ~hopeless

        return jax.lax.while_loop(unfinished, advance, start)

    def _advance(
        self, problem: Problem, manifold: Manifold, backend: Backend | Svd, search: "_Search"
    ) -> "_Search":
        at = search.at
        with jax.named_scope("step"):
            step = _RELAXATION * reweighted_step(problem, manifold, backend, at, self.early_stopping)
        with jax.named_scope("anderson"):
            dual, memory = search.memory(at.dual, step)
            dual = manifold.project_symmetric(symmetric_part(dual))
        target = jnp.maximum(jnp.where(search.stuck, search.level / _FINER, search.gap), self.tolerance)
        finer = (target <= search.level / _FINER) | ((target == self.tolerance) & (target < search.level))
        level = jnp.where(finer, target, search.level)
        with jax.named_scope("evaluate"):
            new = evaluate(problem, manifold, backend, dual, 2 * level, at.vector)
        return search.moved(new, memory.forget(finer | (search.iterations < 0)), level)


class _Search(NamedTuple):
    """Where the outer iteration is, and the best that it has seen."""

    at: Evaluation
    best: Evaluation
    upper: Float[Array, ""]
    memory: Anderson
    level: Float[Array, ""]
    iterations: Int[Array, ""]
    """-1 before the first evaluation, which the first turn of the loop makes: at a residual of zero the step
    is zero. So the loop's body, which is most of the program, stands in it once."""

    @classmethod
    def start(cls, shapes: Evaluation, dual: Array, vector: Array, level: Array) -> Self:
        """Where nothing is known but the first dual variable."""
        # Made from the data, so that over a mapped axis it varies as the data does.
        zero = 0 * dual[0, 0]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) + zero, shapes)
        factors = jax.tree.map(lambda x: x + 1, nothing.factors)
        at = nothing._replace(dual=dual, vector=vector, lower=zero - 1, factors=factors)
        huge = zero + jnp.finfo(zero.dtype).max / 2
        memory = Anderson.create(_MEMORY, dual)
        return cls(at, at, huge, memory, level + zero, zero.astype(jnp.int32) - 1)

    @property
    def gap(self) -> Float[Array, ""]:
        return self.gap_of(self.best.lower)

    @property
    def stuck(self) -> Bool[Array, ""]:
        """Whether the gap is what the damping costs."""
        return self.gap <= 1.1 * self.at.damped / jnp.maximum(self.upper, _NEGLIGIBLE * len(self.at.vector))

    def gap_of(self, value: Float[Array, ""]) -> Float[Array, ""]:
        """Relative to the upper bound."""
        n = len(self.at.vector)
        return jnp.maximum(self.upper - value, 0) / jnp.maximum(self.upper, _NEGLIGIBLE * n)

    def moved(self, at: Evaluation, memory: Anderson, level: Array) -> "_Search":
        better = at.lower > self.best.lower
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), at, self.best)
        # fmin: an iterate that rounding has made NaN is no bound.
        upper = jnp.fmin(self.upper, at.nuclear)
        return _Search(at, best, upper, memory, level, self.iterations + 1)


def _closed_form(shape: tuple[int, ...], manifold: Manifold) -> bool:
    square_stiefel = isinstance(manifold, Stiefel) and shape[-2] == shape[-1]
    return square_stiefel or isinstance(manifold, Unconstrained)


def _normalized(g: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """g with RMS singular value 1; zero stays zero."""
    return unit(g.reshape(-1)).reshape(g.shape) * jnp.sqrt(jnp.asarray(g.shape[-1], g.dtype))


def _plain_muon(g: Float[Array, "*batch m n"], steps: int | None) -> Solution:
    zero = 0 * g[..., 0, 0]
    return Solution(msign(g, steps=steps), None, zero.astype(jnp.int32), zero + jnp.nan)
