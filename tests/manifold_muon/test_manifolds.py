"""Manifolds against float64 NumPy: their constraints, and weights that stay on them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import (
    DGram,
    Manifold,
    Oblique,
    Stiefel,
    Unconstrained,
    constraint_violations,
    from_tall,
    manifold_muon,
    project_params,
    retract,
    scale_by_manifold_muon,
    to_tall,
)
from tests.manifold_muon.manifold_points import (
    MANIFOLDS,
    QUICK,
    on_manifold,
    residual,
    tall_matrices,
)

# ---------------------------------------------------------------------------- constraints


@pytest.mark.parametrize("name", MANIFOLDS)
def test_violation(name):
    w = tall_matrices(0)
    np.testing.assert_allclose(MANIFOLDS[name].violation(w), residual(name, w), rtol=1e-5)
    assert MANIFOLDS[name].violation(on_manifold(name)).max() < 1e-6
    assert MANIFOLDS[name].violation(w).shape == (3,)
    if name != "unconstrained":
        assert residual(name, w).min() > 0.01


def test_violation_does_not_depend_on_dgrams_scale():
    w = tall_matrices(1)
    np.testing.assert_allclose(DGram().violation(100 * w), DGram().violation(w), rtol=1e-5)


def test_dgram_violation_by_loops():
    w = tall_matrices(2, (6, 4)).astype(np.float64)
    total = 0.0
    for i in range(4):
        for j in range(4):
            if i != j:
                total += (w[:, i] @ w[:, j] / np.sqrt(w[:, i] @ w[:, i] * (w[:, j] @ w[:, j]))) ** 2
    np.testing.assert_allclose(DGram().violation(w.astype(np.float32)), np.sqrt(total) / 4, rtol=1e-5)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_project_symmetric_is_a_self_adjoint_projector(name):
    project = MANIFOLDS[name].project_symmetric
    a, b = (x + np.swapaxes(x, -1, -2) for x in (tall_matrices(3, (2, 5, 5)), tall_matrices(4, (2, 5, 5))))
    np.testing.assert_allclose(project(project(a)), project(a), atol=1e-6)
    np.testing.assert_allclose(np.sum(project(a) * b), np.sum(a * project(b)), rtol=1e-4)
    diagonal = np.eye(5, dtype=bool)
    kept = {
        "stiefel": diagonal | True,
        "dgram": ~diagonal,
        "oblique": diagonal,
        "unconstrained": diagonal & False,
    }
    np.testing.assert_array_equal(project(a), a * kept[name.split("-")[0]])


# ---------------------------------------------------------------------------- training

KERNELS = {"tall": (2, 5, 9), "wide": (9, 5), "square": (2, 6, 6)}


def random_tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in KERNELS.items()}


@pytest.mark.parametrize("name", ["stiefel-2", "dgram", "dgram-svd", "oblique"])
def test_weights_stay_on_the_manifold(name):
    """20 steps with random gradients of sizes from 1e-3 to 1e3."""
    assignment = {"*": MANIFOLDS[name]}
    optimizer = manifold_muon(0.02, assignment, adam_learning_rate=0.0, solver=QUICK)
    params = project_params(random_tree(0), assignment)
    gradients = [random_tree(seed) for seed in range(1, 21)]
    sizes = np.geomspace(1e-3, 1e3, 20).astype(np.float32)
    stacked = {key: np.stack([s * g[key] for s, g in zip(sizes, gradients, strict=True)]) for key in KERNELS}

    @jax.jit
    def train(params):
        def step(carry, gradient):
            updates, state = optimizer.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), stacked)[0][0]

    trained = train(params)
    for key, violation in constraint_violations(trained, assignment).items():
        np.testing.assert_allclose(violation, residual(name, to_tall(trained[key])), atol=1e-6)
        assert violation.max() <= 1e-5, key
        assert np.abs(trained[key] - params[key]).max() > 0.02, "the weights did not move"


@pytest.mark.parametrize(
    ("manifold", "radius"),
    [(Stiefel, 2.0), (Stiefel, "spectral"), (Unconstrained, "spectral"), (Oblique, "spectral")],
)
def test_radius(manifold, radius):
    """Stiefel at `spectral` is Condition 1: every singular value, and the update's norm, sqrt(out / in)."""
    assignment = {"*": manifold(radius=radius)}
    params = project_params(random_tree(0), assignment)
    optimizer = scale_by_manifold_muon(assignment, solver=QUICK)
    updates, _ = jax.jit(optimizer.update)(random_tree(1), optimizer.init(params), params)
    for key, shape in KERNELS.items():
        expected = np.sqrt(shape[-1] / shape[-2]) if radius == "spectral" else radius
        if manifold is Stiefel:
            s = np.linalg.svd(params[key], compute_uv=False)
            np.testing.assert_allclose(s, expected, rtol=1e-5)
        if manifold is Oblique:
            columns = np.linalg.norm(to_tall(params[key]), axis=-2)
            np.testing.assert_allclose(columns, expected, rtol=1e-5)
        norms = np.linalg.norm(np.asarray(updates[key]), 2, axis=(-2, -1))
        np.testing.assert_allclose(norms, expected, rtol=1e-3)
    assert max(violation.max() for violation in constraint_violations(params, assignment).values()) < 1e-6


def test_retract_transform_gives_the_retracted_point():
    assignment = {"tall": DGram(), "square": Stiefel(radius=3.0)}
    params, updates = random_tree(2), jax.tree.map(lambda x: 0.1 * x, random_tree(3))
    params = jax.tree.map(jnp.asarray, project_params(params, assignment))
    transform = retract(assignment)
    found, _ = transform.update(updates, transform.init(params), params)
    np.testing.assert_array_equal(found["wide"], updates["wide"])
    moved = {key: to_tall(params[key] + updates[key]) for key in assignment}
    for key, manifold in assignment.items():
        expected = from_tall(manifold.retract(moved[key]), params[key].shape)
        np.testing.assert_allclose(params[key] + found[key], expected, atol=2e-6)


# ---------------------------------------------------------------------------- orientation


def test_tall_is_the_papers_orientation():
    up, down, square = (tall_matrices(16, shape) for shape in ((2, 4, 6), (2, 6, 4), (2, 5, 5)))
    np.testing.assert_array_equal(to_tall(up), np.swapaxes(up, 1, 2))
    np.testing.assert_array_equal(to_tall(down), down)
    np.testing.assert_array_equal(to_tall(square), np.swapaxes(square, 1, 2))
    for kernel in (up, down, square, up[0]):
        np.testing.assert_array_equal(from_tall(to_tall(jnp.asarray(kernel)), kernel.shape), kernel)


def test_square_dgram_constrains_the_papers_columns():
    """W (out, in) has orthogonal columns, so the kernel (in, out) has orthogonal rows."""
    kernel = project_params({"w": tall_matrices(17, (5, 5))}, {"w": DGram()})["w"]
    rows, columns = np.asarray(kernel @ kernel.T), np.asarray(kernel.T @ kernel)
    off = 1 - np.eye(5)
    assert np.abs(rows * off).max() < 1e-5 < 1e-2 < np.abs(columns * off).max()


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize("radius", [0, -1.0, float("inf"), float("nan"), "Spectral", None, (1.0,)])
@pytest.mark.parametrize("manifold", [Stiefel, Oblique, Unconstrained])
def test_bad_radius(manifold, radius):
    with pytest.raises(ValueError, match="radius must be a positive number or 'spectral', got"):
        manifold(radius=radius)


def test_spectral_radius_needs_fans():
    for manifold in (Stiefel("spectral"), Oblique("spectral")):
        for method in (manifold.retract, manifold.project, manifold.violation):
            with pytest.raises(ValueError, match=r"use with_radius\(sqrt\(fan_out / fan_in\)\)"):
                method(jnp.eye(3))
        np.testing.assert_allclose(manifold.with_radius(2.0).retract(jnp.eye(3)), 2 * np.eye(3), atol=1e-5)


def test_bad_retraction():
    with pytest.raises(ValueError, match="unknown retraction 'qr': choose frame or svd"):
        DGram(retraction="qr")


def test_manifold_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Manifold()


def test_a_users_manifolds_are_told_apart_by_value():
    """They group matrices into batches and are static arguments of jit: equal must mean the same."""

    class Plain(DGram):
        pass

    @dataclass(frozen=True)
    class Scaled(DGram):
        factor: float = 1.0

    assert Scaled(factor=1.0) == Scaled(factor=1.0) and Scaled(factor=1.0) != Scaled(factor=2.0)
    assert Plain() == Plain() and Plain() != DGram()

    class Opaque(Manifold):
        def __init__(self, k):
            self.k = k

        project_symmetric = retract = violation = lambda self, x: x

    assert Opaque(1) != Opaque(2)


def test_retract_holds_the_constraint_under_gradients_of_less_precision():
    assignment = {"w": Stiefel()}
    params = project_params(
        {"w": jnp.asarray(np.random.default_rng(5).normal(size=(8, 6)), jnp.float32)}, assignment
    )
    transform = optax.chain(optax.sgd(0.1), retract(assignment))
    gradient = jax.tree.map(lambda x: jnp.ones_like(x, jnp.bfloat16), params)
    updates, _ = transform.update(gradient, transform.init(params), params)
    moved = optax.apply_updates(params, updates)
    assert constraint_violations(moved, assignment)["w"].max() < 1e-6
