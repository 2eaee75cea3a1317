"""Manifolds against float64 NumPy: distances, retractions and projections, and weights that stay on them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import (
    DGram,
    DualAscent,
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

MANIFOLDS = {
    "stiefel": Stiefel(),
    "stiefel-2": Stiefel(radius=2.0),
    "dgram": DGram(),
    "dgram-svd": DGram(retraction="svd"),
    "oblique": Oblique(),
    "oblique-2": Oblique(radius=2.0),
    "unconstrained": Unconstrained(),
}
# Few iterations: these tests are about where weights end, not about the best direction.
QUICK = DualAscent(iterations=3)


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def tall_matrices(seed: int, shape: tuple[int, ...] = (3, 9, 5)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_manifold(name: str, seed: int = 0, shape: tuple[int, ...] = (3, 9, 5)) -> np.ndarray:
    """Tall points of the manifold, by NumPy."""
    w = np.random.default_rng(seed).normal(size=shape)
    scales = np.random.default_rng(seed + 1).uniform(0.3, 3.0, (*shape[:-2], 1, shape[-1]))
    radius = 2.0 if name.endswith("-2") else 1.0
    if name.startswith("stiefel"):
        w = radius * polar(w)
    elif name.startswith("dgram"):
        w = polar(w) * scales
    elif name.startswith("oblique"):
        w = radius * w / np.linalg.norm(w, axis=-2, keepdims=True)
    return w.astype(np.float32)


def residual(name: str, w: np.ndarray) -> np.ndarray:
    """||H||_F / n of what the constraint wants to be zero, one number a matrix."""
    w = np.asarray(w, np.float64)
    if name.endswith("-2"):
        w = w / 2.0
    if name.startswith("dgram"):
        w = w / np.linalg.norm(w, axis=-2, keepdims=True)
    n = w.shape[-1]
    h = np.swapaxes(w, -1, -2) @ w - np.eye(n)
    if name.startswith("dgram"):
        h = h * (1 - np.eye(n))
    if name.startswith("oblique"):
        h = h * np.eye(n)
    if name == "unconstrained":
        h = 0 * h
    return np.linalg.norm(h, axis=(-2, -1)) / n


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


# ---------------------------------------------------------------------------- ways back


@pytest.mark.parametrize("shape", [(3, 9, 5), (2, 6, 6), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("name", MANIFOLDS)
def test_retract_after_a_step(name, shape):
    manifold = MANIFOLDS[name]
    w = on_manifold(name, 5, shape)
    moved = w + 0.02 * tall_matrices(6, shape)
    expected = {
        "stiefel": lambda: polar(moved),
        "stiefel-2": lambda: 2 * polar(moved),
        "oblique": lambda: moved / np.linalg.norm(moved, axis=-2, keepdims=True),
        "oblique-2": lambda: 2 * moved / np.linalg.norm(moved, axis=-2, keepdims=True),
        "unconstrained": lambda: moved,
        "dgram": lambda: frame(moved),
        "dgram-svd": lambda: polar(moved) * np.linalg.svd(moved, compute_uv=False)[..., None, :],
    }[name]()
    found = manifold.retract(moved)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(manifold.project(moved), expected, atol=1e-5)
    assert residual(name, found).max() < 1e-5


def frame(w: np.ndarray) -> np.ndarray:
    w = w.astype(np.float64)
    q = polar(w / np.linalg.norm(w, axis=-2, keepdims=True))
    return q * np.sum(q * w, axis=-2, keepdims=True)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_retract_leaves_points_of_the_manifold_where_they_are(name):
    w = on_manifold(name, 7)
    once = np.asarray(MANIFOLDS[name].retract(w))
    if name == "dgram-svd":  # the reference's does not
        assert np.abs(once - w).max() > 0.1
    else:
        np.testing.assert_allclose(once, w, atol=1e-5)
    np.testing.assert_allclose(MANIFOLDS[name].retract(once), once, atol=1e-5)
    np.testing.assert_allclose(MANIFOLDS[name].project(once), once, atol=1e-5)


def test_dgram_frame_keeps_every_columns_norm():
    """Norms over four decades, in an order that sorting would change."""
    q = polar(np.random.default_rng(8).normal(size=(12, 5)))
    scales = np.array([1e-2, 1e2, 1.0, 1e-1, 10.0])
    w = (q * scales).astype(np.float32)
    for found in (DGram().retract(w), DGram().project(w)):
        np.testing.assert_allclose(np.linalg.norm(found, axis=0), scales, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(found) / scales, q, atol=1e-5)


def test_dgram_frame_is_near_the_nearest_point():
    """Not the nearest, the fixed point of Q = polar(W diag(d)), but of the step's size; `svd` is far away."""
    w = on_manifold("dgram", 9)[0] + 0.02 * tall_matrices(10)[0]
    d = np.linalg.norm(w, axis=0)
    for _ in range(200):
        q = polar(w * d)
        d = np.sum(q * w, axis=0)
    nearest = np.linalg.norm(w - q * d)
    assert nearest <= np.linalg.norm(w - np.asarray(DGram().retract(w))) < 2 * nearest
    assert np.linalg.norm(w - np.asarray(DGram(retraction="svd").retract(w))) > 10 * nearest


@pytest.mark.parametrize("name", MANIFOLDS)
@pytest.mark.parametrize("kind", ["zero", "rank-deficient", "equal columns", "huge", "tiny", "one zero"])
def test_project_from_anywhere(name, kind):
    w = tall_matrices(11)
    w = {
        "zero": 0 * w,
        "rank-deficient": w[..., :2] @ tall_matrices(12, (3, 2, 5)),
        "equal columns": np.broadcast_to(w[..., :1], w.shape),
        "huge": 1e12 * w,
        "tiny": 1e-12 * w,
        "one zero": w * np.array([1, 0, 1, 1, 1], np.float32),
    }[kind].astype(np.float32)
    found = np.asarray(MANIFOLDS[name].project(w))
    assert np.isfinite(found).all()
    if name.startswith("dgram"):  # relative to the largest column: the others may be zero
        gram = np.swapaxes(found, -1, -2).astype(np.float64) @ found
        off = np.abs(gram * (1 - np.eye(5))).max(axis=(-2, -1))
        assert (off <= 1e-5 * np.linalg.norm(found, axis=-2).max(axis=-1) ** 2).all()
    else:
        assert residual(name, found).max() < 1e-5


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("manifold", [Oblique(), DGram()], ids=["oblique", "dgram"])
def test_project_at_any_scale(manifold, scale):
    w = tall_matrices(13)[0] * np.array([1, 10, 1, 0.1, 1], np.float32)
    expected = np.asarray(manifold.project(w), np.float64)
    found = np.asarray(manifold.project(w * np.float32(scale)), np.float64)
    np.testing.assert_allclose(found if isinstance(manifold, Oblique) else found / scale, expected, atol=1e-4)


def test_project_gives_the_nearest_stiefel_point():
    w = tall_matrices(14)
    np.testing.assert_allclose(Stiefel(radius=2.0).project(w), 2 * polar(w), atol=1e-5)


def test_projected_zero_weights_can_be_trained():
    params = project_params({"w": jnp.zeros((4, 6))}, {"*": Stiefel()})
    optimizer = manifold_muon(0.02, {"*": Stiefel()}, adam_learning_rate=0.0, solver=QUICK)
    updates, _ = optimizer.update(
        {"w": jnp.asarray(tall_matrices(15, (4, 6)))}, optimizer.init(params), params
    )
    assert constraint_violations(optax.apply_updates(params, updates), {"*": Stiefel()})["w"].max() < 1e-5


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
