"""The tangent step of one matrix, in n x n Gram space as far as possible.

With M = G + 2 W L for a dual variable L = P(L), S = G^T W, K = G^T G and D = W^T W:

    M^T M = K + 2 (S L + L S^T) + 4 L D L,  A = M R,  W^T A = (S^T + 2 D L) R,  R = (M^T M + eps^2 I)^{-1/2}
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifold_muon.inverse_roots import Backend, Svd
from manifold_muon.manifolds import DGram, Manifold, Stiefel
from manifold_muon.unit_ball import into_ball, reflection, squared_norm
from spectral.products import matmul, symmetric_product

_SVD_NOISE = 3e-4
"""Singular values of M below it, in units of g's RMS singular value, drown in M's own rounding."""
_INNER_STEPS = 8
_INNER_TOLERANCE = 3e-2
"""Of the inner solve, on the square of the preconditioned residual's norm."""


class Problem(NamedTuple):
    """max <G, A> over tangent A with ||A||_2 <= 1, for a G whose RMS singular value is 1 (or G = 0)."""

    g: Float[Array, "m n"]
    w: Float[Array, "m n"]
    gram_g: Float[Array, "n n"]
    """K."""
    cross: Float[Array, "n n"]
    """S."""
    gram_w: Float[Array, "n n"] | Float[Array, " n"]
    """D; its diagonal alone on manifolds with orthogonal columns."""
    sums: Float[Array, "n n"]
    """D_ii + D_jj; 1 where both are zero, and nothing is constrained."""
    size: Float[Array, ""]
    """||K||_F."""

    @classmethod
    def create(cls, g: Float[Array, "m n"], w: Float[Array, "m n"], manifold: Manifold) -> "Problem":
        diagonal, gram_g = jnp.sum(w * w, axis=0), symmetric_product(g.mT, g)
        orthogonal = isinstance(manifold, (Stiefel, DGram))
        sums = diagonal[:, None] + diagonal
        return cls(
            g,
            w,
            gram_g,
            matmul(g.mT, w),
            diagonal if orthogonal else symmetric_product(w.mT, w),
            jnp.where(sums > 0, sums, 1),
            jnp.linalg.norm(gram_g),
        )

    def noise(self, backend: Backend) -> Float[Array, ""]:
        """Least damping: singular values of M below it drown in the rounding of M^T M and its root."""
        return jnp.maximum(jnp.sqrt(backend.rounding * self.size), _SVD_NOISE)

    def first_dual(self, manifold: Manifold) -> Float[Array, "n n"]:
        """The L of the tangent part of G: exact for a square Stiefel W."""
        return -manifold.project_symmetric((self.cross + self.cross.mT) / (2 * self.sums))

    def times_gram_w(self, x: Array) -> Array:
        """D x."""
        return self.gram_w[:, None] * x if self.gram_w.ndim == 1 else matmul(self.gram_w, x)

    def shifted(self, dual: Float[Array, "n n"]) -> Float[Array, "m n"]:
        """M."""
        return self.g + 2 * matmul(self.w, dual)


class Evaluation(NamedTuple):
    """What is known at one L."""

    dual: Float[Array, "n n"]
    root: Float[Array, "n n"]
    """R."""
    nuclear: Float[Array, ""]
    """||M||_*, which no feasible <G, A> exceeds."""
    damped: Float[Array, ""]
    """||M||_* - <M, A>, which damping takes away: the bounds come no closer than this."""
    factors: tuple[Array, ...]
    """Of R, for the backend."""
    residual: Float[Array, "n n"]
    """H = P(W^T A + A^T W), which is zero at the solution."""
    correction: Float[Array, "n n"]
    """C: T = A - W C is tangent."""
    lower: Float[Array, ""]
    """<G, T> / max(1, ||T||_2): a value that is reached."""
    vector: Float[Array, " n"]
    """Leading right singular vector of T, the next evaluation's start."""


def evaluate(
    problem: Problem,
    manifold: Manifold,
    backend: Backend | Svd,
    dual: Float[Array, "n n"],
    damping: Float[Array, ""],
    vector: Float[Array, " n"],
) -> Evaluation:
    """The damped direction at a dual variable, made tangent, and the bounds that it gives."""
    d_dual = problem.times_gram_w(dual)
    if isinstance(backend, Svd):
        a, inverse = backend.direction(problem.shifted(dual), damping, _SVD_NOISE)
        w_a, g_a = matmul(problem.w.mT, a), jnp.sum(problem.g * a)
    else:
        half = 2 * matmul(problem.cross + d_dual.mT, dual)
        gram = problem.gram_g + half + half.mT
        inverse = backend.inverse_root(gram, damping, problem.noise(backend))
        w_a = matmul(problem.cross.mT + 2 * d_dual, inverse.root)
        g_a = jnp.sum(gram * inverse.root) - 2 * jnp.sum(dual * w_a)  # tr(M^T A) - 2 tr(L W^T A)
    residual = manifold.project_symmetric(w_a + w_a.mT)
    correction = residual / problem.sums
    # (A - W C)^T (A - W C) = A^T A - B^T C - C B + C D C with B = W^T A.
    half = matmul(correction, w_a - problem.times_gram_w(correction) / 2)
    square, vector = squared_norm(inverse.direction_gram - half - half.mT, vector)
    lower = (g_a - jnp.sum(problem.cross * correction)) / jnp.sqrt(jnp.maximum(square, 1))
    damped = inverse.nuclear - g_a - 2 * jnp.sum(dual * w_a)
    return Evaluation(
        dual, inverse.root, inverse.nuclear, damped, inverse.factors, residual, correction, lower, vector
    )


def direction(
    problem: Problem, manifold: Manifold, backend: Backend | Svd, at: Evaluation
) -> Float[Array, "m n"]:
    """The tangent direction in m x n, scaled into the unit ball."""
    if isinstance(backend, Svd):
        # Decomposed once more: M v / s has more of M's rounding than of v where s is small.
        a = backend.damped_sign(problem.shifted(at.dual), at.factors)
        t = a - matmul(problem.w, at.correction)
    else:
        of_w = 2 * matmul(at.dual, at.root) - at.correction
        t = matmul(problem.g, at.root) + matmul(problem.w, of_w)
    if problem.g.shape[0] == problem.g.shape[1] and not isinstance(manifold, Stiefel):
        # The hard case, in which the search is cut short.
        t = _reflected(problem, manifold, t, at.vector)
    return into_ball(t, at.vector)


def _reflected(problem: Problem, manifold: Manifold, t: Array, vector: Array) -> Array:
    """A tangent direction of higher value than T, or T.

    T is longer than 1 in some directions, by a tenth where the search was cut short, and dividing it by its
    norm would shorten all of them.
    """
    gram = symmetric_product(t.mT, t)
    square, _ = squared_norm(gram, vector)
    r = matmul(t, reflection(gram, square))
    w_r = matmul(problem.w.mT, r)
    r = r - matmul(problem.w, manifold.project_symmetric(w_r + w_r.mT) / problem.sums)
    new_square, _ = squared_norm(symmetric_product(r.mT, r), vector)

    def value(a: Array, square: Array) -> Array:
        return jnp.sum(problem.g * a) / jnp.sqrt(jnp.maximum(square, 1))

    return jnp.where(value(r, new_square) > value(t, square), r, t)


def reweighted_step(
    problem: Problem, manifold: Manifold, backend: Backend | Svd, at: Evaluation, early_stopping: bool
) -> Float[Array, "n n"]:
    """The change of L that solves P(2 (D dL R + R dL D)) = -H with the weights R held fixed.

    Iteratively reweighted least squares for ||G + 2 W L||_*. On Stiefel it is a Lyapunov equation; elsewhere
    conjugate gradients, for which that equation's solution, sides scaled by D^{-1/4}, is the preconditioner.
    """
    root, factors = at.root, at.factors
    if isinstance(manifold, Stiefel):
        return -0.5 * backend.lyapunov(factors, at.residual)
    diagonal = jnp.diagonal(problem.sums)
    # Bounded, for columns that are zero or next to it.
    scale = (0.5 * jnp.maximum(diagonal, 1e-4 * jnp.max(diagonal))) ** -0.25
    scales = scale[:, None] * scale

    def operator(x: Array) -> Array:
        product = matmul(problem.times_gram_w(x), root)
        return 2 * manifold.project_symmetric(product + product.mT)

    def precondition(x: Array) -> Array:
        return 0.5 * manifold.project_symmetric(scales * backend.lyapunov(factors, scales * x))

    z = precondition(-at.residual)
    start = (0, jnp.zeros_like(z), -at.residual, z, jnp.sum(-at.residual * z))

    def step(carry: tuple) -> tuple:
        count, x, rest, direction, energy = carry
        image = operator(direction)
        length = _ratio(energy, jnp.sum(direction * image))
        x, rest = x + length * direction, rest - length * image
        z = precondition(rest)
        new_energy = jnp.sum(rest * z)
        return count + 1, x, rest, z + _ratio(new_energy, energy) * direction, new_energy

    if not early_stopping:
        return jax.lax.fori_loop(0, _INNER_STEPS // 2, lambda _, carry: step(carry), start)[1]

    def unsolved(carry: tuple) -> Array:
        return (carry[0] < _INNER_STEPS) & (carry[-1] > _INNER_TOLERANCE * start[-1])

    return jax.lax.while_loop(unsolved, step, start)[1]


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
