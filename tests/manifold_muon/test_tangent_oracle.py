"""The oracle itself: closed forms, weak duality against random points, and invariances."""

import numpy as np
import pytest

from tests.manifold_muon import tangent_oracle as oracle
from tests.manifold_muon.tangent_problems import SPECTRA, gradient, orthonormal_columns, random_point

MANIFOLDS = ("stiefel", "dgram", "oblique")
SHAPES = ((12, 12), (13, 13), (36, 12), (48, 12))


def drawn(manifold: str, m: int, n: int, spectrum: str = "i^-1", seed: int = 0):
    rng = np.random.default_rng(seed)
    w = random_point(rng, manifold, m, n)
    return gradient(rng, spectrum, w), w, rng


def assert_optimum(optimum: oracle.Optimum, expected: float) -> None:
    assert optimum.lower <= expected * (1 + 1e-12) and expected <= optimum.upper * (1 + 1e-12)
    np.testing.assert_allclose(optimum.lower, optimum.upper, rtol=1e-4)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_both_bounds_are_certified(manifold, shape, spectrum):
    g, w, _ = drawn(manifold, *shape, spectrum)
    found = oracle.solve(g, w, manifold)
    h = oracle.constrained_entries(manifold, shape[1]) * (w.T @ found.direction + found.direction.T @ w)
    np.testing.assert_allclose(h, 0.0, atol=1e-12)
    assert np.linalg.norm(found.direction, 2) <= 1 + 1e-12
    np.testing.assert_allclose(found.lower, np.sum(g * found.direction), rtol=1e-12)
    np.testing.assert_allclose(found.upper, oracle.upper_bound(g, w, manifold, found.dual), rtol=1e-12)
    gap = found.upper - found.lower
    assert gap <= 1e-4 * max(found.upper, 1e-3 * np.linalg.norm(g, "nuc")) and gap >= -1e-12


@pytest.mark.parametrize("spectrum", ["flat", "i^-1.5", "half-rank"])
@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_weak_duality(manifold, spectrum):
    """No feasible point beats the upper bound and no multiplier the lower one, near or far."""
    g, w, rng = drawn(manifold, 24, 8, spectrum)
    found = oracle.solve(g, w, manifold)
    mask = oracle.constrained_entries(manifold, 8)
    for size in (0.0, 1e-3, 0.1, 1.0, 10.0):
        for _ in range(20):
            a = oracle.make_feasible(found.direction + size * rng.normal(size=g.shape), w, mask)
            noise = rng.normal(size=(8, 8))
            assert np.sum(g * a) <= found.upper * (1 + 1e-12)
            assert oracle.upper_bound(g, w, manifold, found.dual + size * noise) >= found.lower * (1 - 1e-12)


@pytest.mark.parametrize("spectrum", ["flat", "i^-1", "half-rank"])
@pytest.mark.parametrize("n", [12, 13])
def test_square_stiefel_is_solved_by_the_initial_multiplier(n, spectrum):
    """L0 = -(W^T G + G^T W) / 4: what remains is W skew(W^T G), whose sign is tangent."""
    g, w, _ = drawn("stiefel", n, n, spectrum)
    skew = (w.T @ g - g.T @ w) / 2
    found = oracle.solve(g, w, "stiefel")
    assert_optimum(found, np.linalg.norm(skew, "nuc"))
    initial = -(w.T @ g + g.T @ w) / 4
    np.testing.assert_allclose(
        oracle.upper_bound(g, w, "stiefel", initial), np.linalg.norm(skew, "nuc"), rtol=1e-12
    )


@pytest.mark.parametrize("manifold", ["stiefel", "oblique"])
def test_one_column_of_fixed_norm(manifold):
    """The tangent space is w's complement, so A is g's part in it, normalised."""
    g, w, _ = drawn(manifold, 7, 1)
    assert_optimum(oracle.solve(g, w, manifold), np.linalg.norm(g - w * np.sum(w * g)))


def test_one_column_of_free_norm():
    g, w, _ = drawn("dgram", 7, 1)
    assert_optimum(oracle.solve(g, w, "dgram"), np.linalg.norm(g))


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_gradients_orthogonal_to_w(manifold):
    """W^T G = 0: the polar factor of G is tangent already, on every manifold."""
    g, w, _ = drawn(manifold, 36, 12)
    g = g - w @ np.linalg.lstsq(w, g)[0]
    assert_optimum(oracle.solve(g, w, manifold), np.linalg.norm(g, "nuc"))


@pytest.mark.parametrize("shape", [(12, 12), (36, 12)], ids=str)
def test_gradients_that_turn_w(shape):
    """G = W Omega with Omega skew: the polar factor W polar(Omega) is tangent to Stiefel."""
    _, w, rng = drawn("stiefel", *shape)
    omega = rng.normal(size=(12, 12))
    omega = omega - omega.T
    assert_optimum(oracle.solve(w @ omega, w, "stiefel"), np.linalg.norm(omega, "nuc"))


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_gradients_parallel_to_w(manifold):
    """Not tangent at all where norms are fixed; the very direction of DGram's free norms."""
    g, w, _ = drawn(manifold, 36, 12, "parallel")
    found = oracle.solve(g, w, manifold)
    if manifold == "dgram":
        assert_optimum(found, np.linalg.norm(g, "nuc"))
    else:
        assert 0 <= found.lower <= found.upper <= 1e-6 * np.linalg.norm(g, "nuc")


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_zero_gradients(manifold):
    _, w, _ = drawn(manifold, 36, 12)
    found = oracle.solve(np.zeros_like(w), w, manifold)
    assert found.lower == found.upper == 0.0
    np.testing.assert_array_equal(found.direction, 0.0)


@pytest.mark.parametrize("manifold", MANIFOLDS)
def test_invariances(manifold):
    """The optimum scales with G, and knows neither the outputs' basis nor the columns' order."""
    g, w, rng = drawn(manifold, 30, 10, "i^-0.5")
    expected = oracle.solve(g, w, manifold).lower
    q, order = orthonormal_columns(rng, 30, 30), rng.permutation(10)
    np.testing.assert_allclose(oracle.solve(1e-8 * g, w, manifold).lower, 1e-8 * expected, rtol=1e-4)
    np.testing.assert_allclose(oracle.solve(q @ g, q @ w, manifold).lower, expected, rtol=1e-4)
    np.testing.assert_allclose(oracle.solve(g[:, order], w[:, order], manifold).lower, expected, rtol=1e-4)
    if manifold == "stiefel":
        r = orthonormal_columns(rng, 10, 10)
        np.testing.assert_allclose(oracle.solve(g @ r, w @ r, manifold).lower, expected, rtol=1e-4)


def test_scales_and_measures_by_hand():
    """W = 2 e1, 3 e2 in three dimensions: A = (e2, 0) leans W's first column towards its second."""
    w = np.array([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    a = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    # H_12 = H_21 = <a_1, w_2> = 3, over |w_1| |w_2| = 6; n = 2.
    np.testing.assert_allclose(oracle.tangency_error(a, w, "dgram"), np.sqrt(2) * 0.5 / 2)
    assert oracle.tangency_error(a, w, "oblique") == 0.0
    # A - 2 W L with L_12 = L_21 = 3 / 26.
    np.testing.assert_allclose(
        oracle.make_feasible(a, w, oracle.constrained_entries("dgram", 2)),
        [[0.0, -6 / 13], [4 / 13, 0.0], [0.0, 0.0]],
    )


def test_an_unreached_tolerance_is_an_error():
    g, w, _ = drawn("dgram", 12, 12, "i^-1.5")
    with pytest.raises(RuntimeError, match="after 10 iterations"):
        oracle.solve(g, w, "dgram", max_iterations=10)
