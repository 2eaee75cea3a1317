"""How good a direction is, judged in float64 and apart from the solver that found it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from manifold_muon import GramSolver, Manifold

_FOR_THE_BOUND = GramSolver(tolerance=3e-3, max_iterations=60, method="eigh")
"""On a CPU, where benchmarks run, in float64 but for the Gram matrix itself."""


class Quality(NamedTuple):
    """Of a direction A for G at a point W of a manifold."""

    achieved: float
    """<G, A'> over a proven upper bound on the optimum, for A' = A made tangent, then scaled into the unit
    ball: at least this share of the optimum is reached. NaN where the bound is zero."""
    tangency: float
    """||H||_F / n, H_ij = P(W^T A + A^T W)_ij / (|w_i| |w_j|), for A as it is."""


def judge(g: np.ndarray, a: np.ndarray, w: np.ndarray, manifold: Manifold) -> Quality:
    """Judges one direction.

    Args:
      g: what it is to be steep for (m, n), tall, in any units.
      a: the direction.
      w: the point, at radius 1.
      manifold: where it lies, at radius 1.
    """
    g, a, w = (np.asarray(x, np.float64) for x in (g, a, w))
    squares = np.sum(w * w, axis=0)
    residual = _project(manifold, w.T @ a + a.T @ w)
    # W times this correction is exactly what is not tangent: on Stiefel and DGram W^T W is diagonal, on
    # Oblique the correction is.
    tangent = a - w @ (residual / (squares[:, None] + squares))
    feasible = tangent / max(1.0, _singular_values(tangent)[-1])
    bound = upper_bound(g, w, manifold)
    return Quality(
        np.sum(g * feasible) / bound if bound > 0 else np.nan,
        np.linalg.norm(residual / np.sqrt(np.outer(squares, squares))) / len(squares),
    )


def upper_bound(g: np.ndarray, w: np.ndarray, manifold: Manifold) -> float:
    """A bound on max <G, A> over tangent A with ||A||_2 <= 1.

    It is within about 0.3 % of that, and 1.5 % on the steepest spectra.
    By weak duality `||G + 2 W L||_*` is one for every symmetric L = P(L); a solver only proposes the L, and
    the norm is computed in float64.
    """
    solution = _FOR_THE_BOUND(jnp.asarray(g, jnp.float32), jnp.asarray(w, jnp.float32), manifold)
    proposed = solution.dual
    if proposed is None:
        # On a square Stiefel W this is the solution; where there is no constraint it is zero.
        dual = -(g.T @ w + w.T @ g) / 4
    else:
        # It is given in units of G's RMS singular value.
        dual = np.asarray(proposed, np.float64) * np.linalg.norm(g) / np.sqrt(g.shape[1])
    dual = _project(manifold, (dual + dual.T) / 2)
    return float(_singular_values(g + 2 * w @ dual).sum())


def _singular_values(x: np.ndarray) -> np.ndarray:
    """In ascending order; by the Gram matrix, which in float64 leaves them good to 1e-8 of the largest."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(x.T @ x), 0))


def _project(manifold: Manifold, symmetric: np.ndarray) -> np.ndarray:
    mask = np.asarray(manifold.project_symmetric(jnp.ones(symmetric.shape, jnp.float32)), np.float64)
    return mask * symmetric
