"""Ways back to the manifolds against float64 NumPy: retractions and projections, near and far."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import DGram, Oblique, Stiefel, constraint_violations, manifold_muon, project_params
from tests.manifold_muon.manifold_points import (
    MANIFOLDS,
    QUICK,
    frame,
    on_manifold,
    polar,
    residual,
    tall_matrices,
    tangent,
)


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


@pytest.mark.parametrize("eta", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", ["stiefel", "stiefel-2", "dgram"])
def test_retract_after_a_step_of_any_size(name, eta):
    """Steps that are not tangent, relative to the smallest column."""
    w = on_manifold(name, 18)
    step = tall_matrices(19)
    step /= np.linalg.norm(step, 2, axis=(-2, -1))[..., None, None]
    moved = w + eta * np.linalg.norm(w, axis=-2).min() * step
    found = MANIFOLDS[name].retract(moved)
    radius = 2.0 if name.endswith("-2") else 1.0
    expected = frame(moved) if name == "dgram" else radius * polar(moved)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert residual(name, found).max() < 3e-7


@pytest.mark.parametrize("name", ["stiefel", "dgram"])
def test_a_thousand_tangent_steps_do_not_drift(name):
    manifold, rng = MANIFOLDS[name], np.random.default_rng(24)
    retract_ = jax.jit(manifold.retract)
    w = on_manifold(name, 25, (1, 9, 5))
    start = w
    for _ in range(1000):
        w = np.asarray(retract_((w + 0.02 * tangent(name, w, rng.normal(size=w.shape))).astype(np.float32)))
        assert residual(name, w).max() <= 3e-7
    assert np.linalg.norm(w - start) > 0.1


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
