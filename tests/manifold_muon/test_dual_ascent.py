"""The reference solver: what its direction satisfies, and `Unconstrained` against optax's own Muon."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as optax_muon

from manifold_muon import (
    DGram,
    DualAscent,
    Manifold,
    Oblique,
    Solution,
    Stiefel,
    Unconstrained,
    manifold_muon,
    scale_by_manifold_muon,
)
from spectral import msign

MANIFOLDS = {"stiefel": Stiefel(), "dgram": DGram(), "oblique": Oblique(), "unconstrained": Unconstrained()}


@partial(jax.jit, static_argnums=(0, 3))
def solve(solver: DualAscent, g: jax.Array, w: jax.Array, manifold: Manifold) -> jax.Array:
    return solver(g, w, manifold).direction


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def orthogonal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def problem(seed: int, manifold: str, m: int, n: int, decay: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """G with singular values i^-decay, and a point of the manifold."""
    rng = np.random.default_rng(seed)
    g = (orthogonal(rng, m)[:, :n] * np.arange(1.0, n + 1) ** -decay) @ orthogonal(rng, n)
    w = rng.normal(size=(m, n))
    if manifold == "oblique":
        w = w / np.linalg.norm(w, axis=0)
    elif manifold != "unconstrained":
        w = polar(w)
    if manifold == "dgram":
        w = w * rng.uniform(0.5, 2.0, n)
    return g.astype(np.float32), w.astype(np.float32)


def tangency_error(a: np.ndarray, w: np.ndarray, manifold: Manifold) -> float:
    """||P(A^T W + W^T A)||_F / n."""
    product = (w.T @ np.asarray(a, np.float64)).astype(np.float32)
    return float(np.linalg.norm(manifold.project_symmetric(product + product.T)) / w.shape[1])


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    decay=st.floats(0, 2),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
)
@pytest.mark.parametrize("name", MANIFOLDS)
def test_the_direction_is_in_the_unit_ball(name, seed, decay, scale):
    g, w = problem(seed, name, 9, 6, decay)
    a = solve(DualAscent(), g * np.float32(scale), w, MANIFOLDS[name])
    assert np.linalg.norm(np.asarray(a), 2) <= 1.01


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique"])
def test_more_iterations_are_nearer_to_tangent(name):
    g, w = problem(1, name, 24, 8)
    errors = [
        tangency_error(solve(DualAscent(iterations=k), g, w, MANIFOLDS[name]), w, MANIFOLDS[name])
        for k in (1, 20, 100)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique"])
def test_the_direction_is_nearly_optimal(name):
    """A small step size and many iterations close the duality gap: <G, A> against ||G + 2 W L||_*.

    Any L bounds the tangent optimum from above; here the L of a float64 subgradient descent.
    """
    g, w = problem(2, name, 24, 8)
    manifold = MANIFOLDS[name]
    a = np.asarray(solve(DualAscent(iterations=400), g, w, manifold), np.float64)

    def project(s: np.ndarray) -> np.ndarray:
        return np.asarray(manifold.project_symmetric((s + s.T).astype(np.float32)), np.float64) / 2

    dual, bound = np.zeros((8, 8)), np.inf
    for k in range(2000):
        m = g + 2 * w @ dual
        bound = min(bound, np.linalg.norm(m, "nuc"))
        dual = dual - 0.2 / (1 + 0.05 * k) * project(w.T @ polar(m))
    assert tangency_error(a, w, manifold) < 2e-3
    np.testing.assert_allclose(np.sum(g * a), bound, rtol=2e-2)


def square_problem(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Of even size and well conditioned: the skew part of W^T G is far from singular."""
    rng = np.random.default_rng(seed)
    g, w = rng.normal(size=(n, n)), polar(rng.normal(size=(n, n)))
    s = np.linalg.svd(w.T @ g - g.T @ w, compute_uv=False)
    assert s[-1] > 0.1 * np.linalg.norm(s)
    return g.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize(("n", "seed"), [(6, 24), (8, 21)])
def test_square_stiefel_is_solved_by_the_initial_dual(n, seed):
    """G + 2 W L0 = W skew(W^T G) there, whose sign is tangent, and optimal: <G, A> = ||skew(W^T G)||_*."""
    g, w = square_problem(seed, n)
    a = np.asarray(solve(DualAscent(iterations=1), g, w, Stiefel()), np.float64)
    assert tangency_error(a, w, Stiefel()) < 1e-5
    skew = (w.T @ g - g.T @ w).astype(np.float64) / 2
    np.testing.assert_allclose(np.sum(g * a), np.linalg.norm(skew, "nuc"), rtol=1e-5)
    np.testing.assert_allclose(a, w.astype(np.float64) @ polar(skew), atol=1e-4)


@pytest.mark.parametrize("shape", [(10, 6), (6, 6)], ids=str)
def test_stiefel_is_equivariant_under_rotations_of_the_outputs(shape):
    """W -> Q W, G -> Q G turns A into Q A: W^T W, W^T G and G^T G do not change."""
    g, w = square_problem(24, 6) if shape == (6, 6) else problem(4, "stiefel", *shape)
    q = orthogonal(np.random.default_rng(5), shape[0]).astype(np.float32)
    a = np.asarray(solve(DualAscent(), g, w, Stiefel()))
    np.testing.assert_allclose(solve(DualAscent(), q @ g, q @ w, Stiefel()), q @ a, atol=2e-4)


def test_stiefel_is_equivariant_under_rotations_of_the_inputs():
    g, w = problem(6, "stiefel", 10, 6)
    r = orthogonal(np.random.default_rng(7), 6).astype(np.float32)
    a = np.asarray(solve(DualAscent(), g, w, Stiefel()))
    np.testing.assert_allclose(solve(DualAscent(), g @ r, w @ r, Stiefel()), a @ r, atol=2e-4)


@pytest.mark.parametrize("name", ["dgram", "oblique"])
def test_permuted_columns_give_permuted_directions(name):
    g, w = problem(8, name, 10, 6)
    order = np.random.default_rng(9).permutation(6)
    a = np.asarray(solve(DualAscent(), g, w, MANIFOLDS[name]))
    permuted = solve(DualAscent(), g[:, order], w[:, order], MANIFOLDS[name])
    np.testing.assert_allclose(permuted, a[:, order], atol=2e-4)


def test_a_batch_is_a_loop():
    pairs = [problem(seed, "stiefel", 9, 6) for seed in range(3)]
    g, w = (np.stack(side) for side in zip(*pairs, strict=True))
    loop = np.stack([solve(DualAscent(), *pair, Stiefel()) for pair in pairs])
    np.testing.assert_allclose(solve(DualAscent(), g, w, Stiefel()), loop, atol=2e-5)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_zero_gradients_give_zero_directions(name):
    _, w = problem(0, name, 9, 6)
    np.testing.assert_array_equal(solve(DualAscent(), np.zeros_like(w), w, MANIFOLDS[name]), 0.0)


def test_bfloat16_matrix_signs():
    g, w = problem(10, "stiefel", 24, 8)
    exact = np.asarray(solve(DualAscent(), g, w, Stiefel()))
    a = np.asarray(solve(DualAscent(msign_dtype="bfloat16"), g, w, Stiefel()))
    assert a.dtype == np.float32
    assert 1e-4 < np.abs(a - exact).max() < 0.05
    assert np.linalg.norm(a, 2) < 1.05


@pytest.mark.parametrize("settings", [{"iterations": 0}, {"msign_steps": 0}, {"iterations": -3}])
def test_dual_ascent_needs_iterations(settings):
    with pytest.raises(ValueError, match="iterations and msign_steps must be at least 1, got DualAscent"):
        DualAscent(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"msign_dtype": "float8"}, "msign_dtype must be float32 or bfloat16, got 'float8'"),
        ({"step_size": float("nan")}, "step_size must be positive, got nan"),
        ({"step_size": -1}, "step_size must be positive, got -1"),
    ],
)
def test_dual_ascent_checks_its_other_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DualAscent(**settings)


# ---------------------------------------------------------------------------- optax's Muon


class MuonSolver:
    """The constant quintic in 5 steps, as in optax, through the library's Solver protocol."""

    def init(self, shape: tuple[int, ...], manifold: Manifold) -> None:
        return None

    def __call__(self, g: jax.Array, w: jax.Array, manifold: Manifold, dual: None = None) -> Solution:
        assert isinstance(manifold, Unconstrained)
        none = jnp.zeros(g.shape[:-2])
        return Solution(msign(g, method="muon", steps=5), None, none.astype(jnp.int32), none)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_unconstrained_is_optaxs_muon(weight_decay):
    """Without Nesterov; its moving average and bias correction only scale the momentum."""
    rng = np.random.default_rng(11)
    # optax scales by sqrt(max(1, fan_out / fan_in)), ours does not: no fan_out > fan_in here.
    shapes = {"a": {"kernel": (8, 6)}, "b": {"kernel": (2, 7, 7)}, "bias": (3,)}

    def draw():
        return jax.tree.map(
            lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
        )

    params = jax.tree.map(jnp.asarray, draw())
    kernels = MuonDimensionNumbers(-2, -1)
    theirs = optax_muon(
        0.02,
        nesterov=False,
        weight_decay=weight_decay,
        adam_b2=0.95,
        adam_learning_rate=3e-3,
        muon_weight_dimension_numbers={"a": {"kernel": kernels}, "b": {"kernel": kernels}, "bias": None},
    )
    ours = manifold_muon(
        0.02,
        {"*kernel": Unconstrained()},
        adam_learning_rate=3e-3,
        nesterov=False,
        weight_decay=weight_decay,
        solver=MuonSolver(),
    )
    states, both = [theirs.init(params), ours.init(params)], [params, params]
    updates = [jax.jit(theirs.update), jax.jit(ours.update)]
    for _ in range(3):
        gradients = draw()
        for i in range(2):
            change, states[i] = updates[i](gradients, states[i], both[i])
            both[i] = optax.apply_updates(both[i], change)
    for expected, found in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_unconstrained_direction_is_the_matrix_sign():
    """Not of the gradient but of its Nesterov momentum: at the first step the same."""
    g = np.random.default_rng(12).normal(size=(2, 9, 6)).astype(np.float32)
    optimizer = scale_by_manifold_muon({"*": Unconstrained()}, solver="dual_ascent")
    params = {"w": jnp.zeros((2, 9, 6))}
    updates, _ = optimizer.update({"w": g}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], polar(g), atol=1e-5)
