"""DGram with its columns' norms limited."""

import jax
import numpy as np
import optax
import pytest

from manifold_muon import DGram, constraint_violations, manifold_muon, project_params, to_tall
from tests.manifold_muon.manifold_points import QUICK, on_manifold, residual, tall_matrices

KERNELS = {"tall": (2, 5, 9), "wide": (9, 5), "square": (2, 6, 6)}


@pytest.mark.parametrize("retraction", ["frame", "svd"])
@pytest.mark.parametrize("method", ["retract", "project"])
def test_max_scale_cuts_columns(retraction, method):
    w = on_manifold("dgram", 20) + 0.02 * tall_matrices(21)
    free = np.asarray(getattr(DGram(retraction), method)(w))
    norms = np.linalg.norm(free, axis=-2, keepdims=True)
    limited = DGram(retraction, max_scale=1.2)
    found = np.asarray(getattr(limited, method)(w))
    np.testing.assert_allclose(found, free * np.minimum(1.2 / norms, 1), atol=1e-6)
    assert (norms > 1.2).any() and (norms < 1.2).any()
    assert limited.violation(found).max() < 1e-6
    assert np.linalg.norm(found, 2, axis=(-2, -1)).max() < 1.2 * (1 + 1e-6)
    if retraction == "frame":  # the reference's moves points of the manifold
        np.testing.assert_allclose(getattr(limited, method)(found), found, atol=1e-6)


def test_violation_sees_columns_above_max_scale():
    w = on_manifold("dgram", 22)
    norms = np.linalg.norm(w.astype(np.float64), axis=-2)
    excess = np.maximum((norms / 1.5) ** 2 - 1, 0)
    found = DGram(max_scale=1.5).violation(w)
    np.testing.assert_allclose(found, np.linalg.norm(excess, axis=-1) / 5, rtol=1e-5)
    assert found.min() > 1e-3 > DGram().violation(w).max()
    w = tall_matrices(0)
    np.testing.assert_allclose(DGram(max_scale=10.0).violation(w), residual("dgram", w), rtol=1e-5)


def test_max_scale_holds_in_training():
    assignment = {"*": DGram(max_scale=1.05)}
    rng = np.random.default_rng(23)
    kernels = {key: rng.normal(size=shape).astype(np.float32) for key, shape in KERNELS.items()}
    params = project_params(kernels, assignment)
    optimizer = manifold_muon(0.1, assignment, adam_learning_rate=0.0, solver=QUICK)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(5):
        updates, state = update(jax.tree.map(lambda x: -x, params), state, params)  # towards larger columns
        params = optax.apply_updates(params, updates)
    for violation in constraint_violations(params, assignment).values():
        assert violation.max() < 1e-6
    largest = max(np.linalg.norm(to_tall(w), axis=-2).max() for w in params.values())
    assert largest == pytest.approx(1.05, rel=1e-5)


@pytest.mark.parametrize("max_scale", [0, -1.0, float("inf"), float("nan"), "1", (1.0,)])
def test_bad_max_scale(max_scale):
    with pytest.raises(ValueError, match="max_scale must be a positive number or None, got"):
        DGram(max_scale=max_scale)


def test_max_scale_tells_manifolds_apart():
    assert DGram(max_scale=2.0) == DGram(max_scale=2.0) != DGram(max_scale=3.0)
    assert hash(DGram(max_scale=2.0)) == hash(DGram(max_scale=2.0)) != hash(DGram())
