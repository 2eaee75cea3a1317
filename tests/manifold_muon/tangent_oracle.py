"""The tangent step's optimum in float64 NumPy, certified from both sides, and measures of a direction.

    max_A <G, A>  s.t.  ||A||_2 <= 1,  P(A^T W + W^T A) = 0      =      min_L ||G + 2 W L||_*,  L = L^T = P(L)

by the alternating direction method of multipliers in the full (m, n) space, on the splitting M = G + 2 W L
whose multiplier is A. Any feasible A bounds the optimum from below and any L from above, so that a small gap
proves the result, however it was found.
"""

from typing import NamedTuple

import numpy as np


class Optimum(NamedTuple):
    """Both sides of the optimum, and what certifies them."""

    lower: float
    """<G, direction>."""
    upper: float
    """||G + 2 W dual||_*."""
    direction: np.ndarray
    """A (m, n): tangent, of spectral norm 1 at most."""
    dual: np.ndarray
    """L (n, n): symmetric, with entries only where the manifold constrains the Gram matrix."""
    iterations: int


def constrained_entries(manifold: str, n: int) -> np.ndarray:
    """P as a mask: 1 at the entries of W^T W that the manifold fixes."""
    return {"stiefel": np.ones((n, n)), "dgram": 1 - np.eye(n), "oblique": np.eye(n)}[manifold]


def symmetric_product(w: np.ndarray, a: np.ndarray) -> np.ndarray:
    product = w.T @ a
    return product + product.T


def nearest_multiplier(x: np.ndarray, w: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The L = P(L) of the smallest ||X - 2 W L||_F, for W with P(W^T W - diagonal) = 0.

    The normal equation P(W^T X + X^T W) = 2 P(D L + L D) is elementwise, D = W^T W being diagonal where it
    matters: on Stiefel and DGram it is diagonal itself, on Oblique L is.
    """
    squares = np.sum(w * w, axis=0)
    return mask * symmetric_product(w, x) / (2 * (squares[:, None] + squares))


def make_feasible(a: np.ndarray, w: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A projected on the tangent space, then scaled into the unit ball."""
    tangent = a - 2 * w @ nearest_multiplier(a, w, mask)
    return tangent / max(1.0, np.linalg.norm(tangent, 2))


def solve(
    g: np.ndarray, w: np.ndarray, manifold: str, tolerance: float = 1e-4, max_iterations: int = 5000
) -> Optimum:
    """The optimum, to `tolerance` of itself (of 1e-3 ||G||_* where it is smaller than that).

    Args:
      g: gradient, tall.
      w: point of the manifold at any radius, of the same shape.
      manifold: stiefel, dgram or oblique.
      tolerance: largest relative gap between the two sides.
      max_iterations: singular value decompositions.

    Raises:
      RuntimeError: the gap is still larger after max_iterations.

    Source: Boyd et al., "Distributed Optimization and Statistical Learning via ADMM", 2011, sections 3.4.1
    (penalty) and 3.4.3 (over-relaxation).
    """
    g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
    mask = constrained_entries(manifold, w.shape[1])
    best = Optimum(0.0, np.linalg.norm(g, "nuc"), np.zeros_like(g), np.zeros_like(mask), 0)
    if best.upper == 0.0:
        return best
    floor = 1e-3 * best.upper
    threshold = 0.3 * best.upper / g.shape[1]
    split, a = g, np.zeros_like(g)
    for iteration in range(1, max_iterations + 1):
        dual = nearest_multiplier(split - threshold * a - g, w, mask)
        affine = g + 2 * w @ dual
        u, s, vt = np.linalg.svd(1.6 * affine - 0.6 * split + threshold * a, full_matrices=False)
        previous, split = split, (u * np.maximum(s - threshold, 0.0)) @ vt
        a = (u * np.minimum(s / threshold, 1.0)) @ vt
        if iteration % 10:
            continue
        best = _better(best, g, make_feasible(a, w, mask), affine, dual, iteration)
        if best.upper - best.lower <= tolerance * max(best.upper, floor):
            return best
        # A penalty that changes for ever need not converge.
        if iteration <= 1000:
            primal, moved = np.linalg.norm(affine - split), np.linalg.norm(split - previous)
            threshold *= 1 / 1.5 if primal > 5 * moved else 1.5 if moved > 5 * primal else 1.0
    raise RuntimeError(f"gap {best.upper - best.lower} of {best.upper} after {max_iterations} iterations")


def _better(
    best: Optimum, g: np.ndarray, a: np.ndarray, affine: np.ndarray, dual: np.ndarray, iteration: int
) -> Optimum:
    value, bound = float(np.sum(g * a)), float(np.linalg.norm(affine, "nuc"))
    if value > best.lower:
        best = best._replace(lower=value, direction=a)
    if bound < best.upper:
        best = best._replace(upper=bound, dual=dual)
    return best._replace(iterations=iteration)


def upper_bound(g: np.ndarray, w: np.ndarray, manifold: str, dual: np.ndarray) -> float:
    """||G + 2 W P(sym L)||_*, which no feasible value exceeds, whatever L is."""
    g, w, dual = (np.asarray(x, np.float64) for x in (g, w, dual))
    masked = constrained_entries(manifold, w.shape[1]) * (dual + dual.T) / 2
    return float(np.linalg.norm(g + 2 * w @ masked, "nuc"))


def certified_bound(g: np.ndarray, w: np.ndarray, manifold: str, dual: np.ndarray | None) -> float:
    """The upper bound by a solver's dual, in units of g's RMS singular value.

    Weak duality does not ask where the dual is from: it is as good a witness as any, and cheaper than a
    second solution. None stands for the exact one, of a square Stiefel W.
    """
    g, w = g.astype(np.float64), w.astype(np.float64)
    if dual is None:
        return upper_bound(g, w, manifold, -0.25 * symmetric_product(w, g))
    return upper_bound(g, w, manifold, np.linalg.norm(g) / np.sqrt(g.shape[1]) * np.asarray(dual, np.float64))


def feasible_value(g: np.ndarray, a: np.ndarray, w: np.ndarray, manifold: str) -> float:
    """<G, A> after A is made exactly feasible in float64: the part of its value that counts."""
    g, a, w = (np.asarray(x, np.float64) for x in (g, a, w))
    return float(np.sum(g * make_feasible(a, w, constrained_entries(manifold, w.shape[1]))))


def tangency_error(a: np.ndarray, w: np.ndarray, manifold: str) -> float:
    """||H||_F / n for H_ij = P(A^T W + W^T A)_ij / (|w_i| |w_j|): how fast the columns' cosines change."""
    a, w = np.asarray(a, np.float64), np.asarray(w, np.float64)
    norms = np.linalg.norm(w, axis=0)
    h = constrained_entries(manifold, w.shape[1]) * symmetric_product(w, a)
    return float(np.linalg.norm(h / np.outer(norms, norms)) / w.shape[1])
