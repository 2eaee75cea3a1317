"""What the Gram-space solver's direction does not depend on, its edge cases, and JAX's transformations."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifold_muon import (
    DGram,
    GramSolver,
    Oblique,
    Stiefel,
    Unconstrained,
    project_params,
    scale_by_manifold_muon,
    to_tall,
)
from tests.manifold_muon import tangent_oracle as oracle
from tests.manifold_muon.tangent_problems import orthonormal_columns, problem

MANIFOLDS = {"stiefel": Stiefel(), "dgram": DGram(), "oblique": Oblique()}
METHODS = ("eigh", "products")
SHAPE = (20, 8)
TOLERANCE = GramSolver().tolerance
# The solver promises the value to its tolerance, not which of the directions that reach it.
decays = st.sampled_from(["flat", "i^-0.5", "i^-1", "i^-1.5", "half-rank"])
seeds = st.integers(0, 2**31)
few = settings(max_examples=8, deadline=None)
each = pytest.mark.parametrize("name", MANIFOLDS)
both = pytest.mark.parametrize("method", METHODS)


def solve(name: str, g: np.ndarray, w: np.ndarray, dual=None, **options):
    solver = GramSolver(**options)
    # Zeros are no warm start: cold and warm calls are one compiled function.
    return solver(g, w, MANIFOLDS[name], solver.init(g.shape, MANIFOLDS[name]) if dual is None else dual)


def value(name: str, g: np.ndarray, w: np.ndarray, direction) -> float:
    return oracle.feasible_value(g, np.asarray(direction), w, name)


def assert_solved(name: str, g: np.ndarray, w: np.ndarray, direction) -> None:
    """Tangent, nearly in the unit ball, and within the default tolerance of the optimum."""
    optimum = oracle.solve(g, w, name, 1e-3)
    a = np.asarray(direction, np.float64)
    assert oracle.tangency_error(a, w, name) <= 1e-3
    assert np.linalg.norm(a, 2) <= 1.01
    assert oracle.feasible_value(g, a, w, name) >= (1 - 1.2 * TOLERANCE) * optimum.upper


# ---------------------------------------------------------------------------- invariances


@few
@given(seed=seeds, decay=decays, exponent=st.floats(-30, 30))
@both
@each
def test_scale(name, method, seed, decay, exponent):
    g, w = problem(name, *SHAPE, decay, seed)
    scaled = g * np.float32(10**exponent)
    found = solve(name, scaled, w, method=method)
    assert_solved(name, g, w, found.direction)


@few
@given(seed=seeds, decay=decays, exponent=st.integers(-100, 100))
@both
@each
def test_powers_of_two_change_nothing(name, method, seed, decay, exponent):
    """Scaling by them is exact, so the same iterations are made and the same direction is found."""
    g, w = problem(name, *SHAPE, decay, seed)
    one, other = (solve(name, x, w, method=method) for x in (g, g * np.float32(2.0**exponent)))
    np.testing.assert_allclose(other.direction, one.direction, atol=1e-5)
    assert one.iterations == other.iterations


@few
@given(seed=seeds, decay=decays)
@both
@each
def test_columns_order(name, method, seed, decay):
    g, w = problem(name, *SHAPE, decay, seed)
    order = np.random.default_rng(seed).permutation(SHAPE[1])
    permuted = np.asarray(solve(name, g[:, order], w[:, order], method=method).direction)
    direction = solve(name, g, w, method=method).direction
    np.testing.assert_allclose(
        value(name, g, w, permuted[:, np.argsort(order)]), value(name, g, w, direction), rtol=TOLERANCE
    )


@few
@given(seed=seeds, decay=decays)
@both
@each
def test_the_outputs_basis(name, method, seed, decay):
    """W -> Q W, G -> Q G turns A into Q A: the Gram matrices do not change."""
    g, w = problem(name, *SHAPE, decay, seed)
    q = orthonormal_columns(np.random.default_rng(seed), SHAPE[0], SHAPE[0])
    turned = solve(name, (q @ g).astype(np.float32), (q @ w).astype(np.float32), method=method).direction
    direction = solve(name, g, w, method=method).direction
    np.testing.assert_allclose(
        value(name, g, w, q.T @ np.asarray(turned)), value(name, g, w, direction), rtol=TOLERANCE
    )


@few
@given(seed=seeds, decay=decays)
@both
def test_the_inputs_basis(method, seed, decay):
    """On Stiefel: W -> W R, G -> G R turns A into A R."""
    g, w = problem("stiefel", *SHAPE, decay, seed)
    r = orthonormal_columns(np.random.default_rng(seed), SHAPE[1], SHAPE[1])
    turned = solve("stiefel", (g @ r).astype(np.float32), (w @ r).astype(np.float32), method=method).direction
    direction = solve("stiefel", g, w, method=method).direction
    np.testing.assert_allclose(
        value("stiefel", g, w, np.asarray(turned) @ r.T), value("stiefel", g, w, direction), rtol=TOLERANCE
    )


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(2, 3, m, n): easy and hard ones, and a zero."""
    kinds = ["flat", "i^-1.5", "half-rank", "zero", "i^-1", "i^-0.5"]
    pairs = [problem(name, *SHAPE, kind, seed) for seed, kind in enumerate(kinds)]
    g, w = (np.stack(side).reshape(2, 3, *SHAPE) for side in zip(*pairs, strict=True))
    return g, w


@both
@each
def test_a_batch_is_a_loop(name, method):
    """Each matrix stops for itself."""
    g, w = batch(name)
    pairs = list(zip(g.reshape(6, *SHAPE), w.reshape(6, *SHAPE), strict=True))
    batched = solve(name, g, w, method=method)
    alone = [solve(name, *pair, method=method) for pair in pairs]
    loop = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(2, 3, *leaves[0].shape), *alone)
    np.testing.assert_array_equal(batched.iterations, loop.iterations)
    np.testing.assert_allclose(batched.direction, loop.direction, atol=1e-3)
    np.testing.assert_allclose(batched.gap, loop.gap, atol=1e-3)
    np.testing.assert_allclose(batched.dual, loop.dual, atol=1e-3)


# ---------------------------------------------------------------------------- warm starts and modes


@few
@given(seed=seeds, decay=decays)
@both
@each
def test_a_solved_problem_is_done_at_once(name, method, seed, decay):
    g, w = problem(name, *SHAPE, decay, seed)
    cold = solve(name, g, w, method=method)
    warm = solve(name, 1e3 * g, w, cold.dual, method=method)  # the dual is in units of g's size
    assert warm.iterations <= max(1, cold.iterations // 2)
    assert_solved(name, g, w, warm.direction)


@few
@given(seed=seeds, decay=decays, size=st.sampled_from([1e-3, 1.0, 1e3]))
@both
@each
def test_any_start_leads_to_the_same_value(name, method, seed, decay, size):
    """Also one far away, not symmetric and not of the manifold's form."""
    g, w = problem(name, *SHAPE, decay, seed)
    start = size * np.random.default_rng(seed).normal(size=(SHAPE[1], SHAPE[1])).astype(np.float32)
    found = solve(name, g, w, start, method=method, max_iterations=40)
    assert_solved(name, g, w, found.direction)


@few
@given(seed=seeds, decay=decays)
@each
def test_a_fixed_number_of_iterations(name, seed, decay):
    """Those after the tolerance is met cost no accuracy."""
    g, w = problem(name, *SHAPE, decay, seed)
    fixed = solve(name, g, w, method="products", early_stopping=False, max_iterations=20)
    assert fixed.iterations == 20
    assert_solved(name, g, w, fixed.direction)


@few
@given(seed=seeds, decay=decays)
@each
def test_both_methods_agree(name, seed, decay):
    g, w = problem(name, *SHAPE, decay, seed)
    values = [value(name, g, w, solve(name, g, w, method=method).direction) for method in METHODS]
    np.testing.assert_allclose(*values, rtol=TOLERANCE)


def test_auto_is_eigh_on_a_cpu():
    g, w = problem("stiefel", *SHAPE, "i^-1")
    np.testing.assert_array_equal(
        solve("stiefel", g, w).direction, solve("stiefel", g, w, method="eigh").direction
    )


def fresh(name: str) -> tuple[np.ndarray, np.ndarray]:
    """As a fresh GPT-2 has them: one direction dominates, the others fall off over four decades."""
    rng = np.random.default_rng(5)
    m, n = 192, 48
    _, w = problem(name, m, n, "flat")
    s = np.concatenate([[1.0], 0.15 * np.geomspace(1, 1e-4, n - 1)])
    return (((orthonormal_columns(rng, m, n) * s) @ orthonormal_columns(rng, n, n).T).astype(np.float32), w)


@each
def test_gradients_nearly_of_rank_one(name):
    """By products the direction is as good as its damping lets it be, and the gap says so."""
    g, w = fresh(name)
    for method in ("auto", "svd"):
        assert_solved(name, g, w, solve(name, g, w, method=method).direction)
    by_products = solve(name, g, w, method="products")
    optimum = oracle.solve(g, w, name, 1e-3).lower
    loss = 1 - value(name, g, w, by_products.direction) / optimum
    assert loss <= min(0.025, by_products.gap + 1e-3)
    assert by_products.iterations < GramSolver().max_iterations


@both
def test_square_stiefel_and_no_constraint_need_no_iterations(method):
    g, w = problem("stiefel", 8, 8, "i^-1")
    found = solve("stiefel", g, w, method=method)
    assert found.iterations == 0
    assert_solved("stiefel", g, w, found.direction)
    free = GramSolver(method=method)(g, w, Unconstrained())
    assert free.iterations == 0
    assert np.sum(g * np.asarray(free.direction)) >= (1 - TOLERANCE) * np.linalg.norm(g, "nuc")
    tight = GramSolver(method=method, tolerance=1e-3)(g, w, Unconstrained())
    u, _, vt = np.linalg.svd(g.astype(np.float64))
    np.testing.assert_allclose(tight.direction, u @ vt, atol=1e-4)


# ---------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("shape", [(1, 1), (5, 2)], ids=str)
@both
@each
def test_small_matrices(name, method, shape):
    g, w = problem(name, *shape, "flat")
    found = solve(name, g, w, method=method)
    if shape == (1, 1) and name != "dgram":
        np.testing.assert_allclose(found.direction, 0.0, atol=1e-3)
    else:
        assert_solved(name, g, w, found.direction)


@both
@pytest.mark.parametrize("zeros", [[1], [1, 3], range(8)], ids=str)
def test_zero_columns_of_dgram(method, zeros):
    """Layers that start at zero: their columns are free to go anywhere."""
    g, w = problem("dgram", *SHAPE, "i^-1")
    w[:, zeros] = 0.0
    a = np.asarray(solve("dgram", g, w, method=method).direction, np.float64)
    h = oracle.constrained_entries("dgram", 8) * (w.T @ a + a.T @ w)
    np.testing.assert_allclose(h, 0.0, atol=1e-3)
    assert np.linalg.norm(a, 2) <= 1.01
    if len(zeros) == 8:
        np.testing.assert_allclose(np.sum(g * a), np.linalg.norm(g, "nuc"), rtol=TOLERANCE)


@both
def test_spread_column_norms_of_dgram(method):
    rng = np.random.default_rng(0)
    g, w = problem("dgram", *SHAPE, "i^-1")
    w = (w / np.linalg.norm(w, axis=0) * rng.permutation(np.geomspace(0.1, 10, 8))).astype(np.float32)
    assert_solved("dgram", g, w, solve("dgram", g, w, method=method).direction)


@both
@each
def test_a_nan_stays_where_it_is(name, method):
    """In a batch it spoils its own matrix alone, and no loop waits for it."""
    g, w = batch(name)
    clean = solve(name, g, w, method=method)
    g[0, 1, 3, 3] = np.nan
    found = solve(name, g, w, method=method)
    assert not np.isfinite(found.direction[0, 1]).any()
    others = np.arange(6).reshape(2, 3) != 1
    np.testing.assert_array_equal(found.iterations[others], clean.iterations[others])
    np.testing.assert_allclose(found.direction[others], clean.direction[others], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"max_iterations": -1}, "max_iterations"),
        ({"method": "qr"}, "method"),
    ],
    ids=str,
)
def test_bad_options_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        GramSolver(**options)


# ---------------------------------------------------------------------------- transformations


@both
def test_jit_vmap_and_scan(method):
    g, w = map(jnp.asarray, batch("dgram"))
    run = jax.vmap(partial(GramSolver(method=method), manifold=DGram()))

    @jax.jit
    def scanned(g: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, gw: (carry, run(*gw)), None, (g, w))[1]

    expected = solve("dgram", g, w, method=method)
    np.testing.assert_array_equal(scanned(g, w).iterations, expected.iterations)
    np.testing.assert_allclose(scanned(g, w).direction, expected.direction, atol=1e-3)


@each
def test_derivatives_of_a_fixed_number_of_iterations(name):
    """Reverse mode against central differences, along a random change of G."""
    g, w = problem(name, *SHAPE, "flat")
    rng = np.random.default_rng(1)
    weights, change = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    solver = GramSolver(method="products", early_stopping=False, max_iterations=3)

    def function(g: jax.Array) -> jax.Array:
        return jnp.sum(weights * solver(g, w, MANIFOLDS[name]).direction)

    value_and_gradient = jax.jit(jax.value_and_grad(function))
    step = 3e-3
    ahead, behind = (value_and_gradient(g + sign * step * change)[0] for sign in (1, -1))
    difference = (ahead - behind) / (2 * step)
    gradient = value_and_gradient(g)[1]
    assert jnp.isfinite(gradient).all()
    np.testing.assert_allclose(jnp.sum(gradient * change), difference, rtol=2e-2)


# ---------------------------------------------------------------------------- within the transform


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)], ids=str)
@pytest.mark.parametrize("manifold", [Stiefel, Oblique])
@pytest.mark.parametrize("radius", [0.1, 3.0, "spectral"])
def test_the_transforms_direction_is_solved_at_any_radius(manifold, radius, shape):
    """The update is the radius times the direction at W / radius, for kernels (in, out) tall or wide."""
    rng = np.random.default_rng(3)
    name = manifold.__name__.lower()
    assignment = {"*": manifold(radius=radius)}
    params = project_params({"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}, assignment)
    optimizer = scale_by_manifold_muon(assignment)
    gradient = rng.normal(size=shape).astype(np.float32)
    updates, _ = optimizer.update({"w": gradient}, optimizer.init(params), params)
    number = np.sqrt(shape[1] / shape[0]) if radius == "spectral" else radius
    tall = [np.asarray(to_tall(jnp.asarray(x)))[0] for x in (gradient, params["w"] / number, updates["w"])]
    assert_solved(name, tall[0], tall[1], tall[2] / number)


def test_the_transforms_warm_start_saves_iterations():
    """The same gradient again and again: after the first step there is little left to do."""
    rng = np.random.default_rng(4)
    assignment = {"*": Stiefel()}
    params = project_params({"w": jnp.asarray(rng.normal(size=(8, 20)), jnp.float32)}, assignment)
    gradient = {"w": problem("stiefel", 20, 8, "i^-1.5")[0].T}
    optimizer = scale_by_manifold_muon(assignment)
    state = optimizer.init(params)
    iterations = []
    for _ in range(3):
        _, state = optimizer.update(gradient, state, params)
        iterations.append(int(state.diagnostics.iterations["w"].max()))
    assert iterations[0] > 1 >= max(iterations[1:])


def test_solvers_are_compared_by_value():
    """As static arguments of jit: equal settings compile once."""
    assert GramSolver() == GramSolver() and hash(GramSolver()) == hash(GramSolver())
    assert replace(GramSolver(), tolerance=0.1) != GramSolver()
