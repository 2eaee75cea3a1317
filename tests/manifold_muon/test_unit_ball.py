"""Norms of matrices near the unit ball, and the reflection of what sticks out, against their definitions."""

import jax.numpy as jnp
import numpy as np
import pytest

from manifold_muon.unit_ball import into_ball, reflection, squared_norm

N = 96


def with_singular_values(values: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A (2 N, N) in float32, and its right singular vectors as columns."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(m, N)))[0] for m in (2 * N, N))
    return np.float32((left * values) @ right.T), right


def nearly_flat(norm: float) -> np.ndarray:
    """Most singular values just below 1, as a direction's are, and two above."""
    values = np.linspace(0.9, 1, N)
    values[:4] = (norm, 1 + 0.9 * (norm - 1), 0.3, 0)
    return values


@pytest.mark.parametrize("norm", [1.002, 1.01, 1.1, 1.8, 60])
@pytest.mark.parametrize("start", ["random", "leading", "orthogonal to the leading"])
def test_norm(norm, start):
    a, right = with_singular_values(nearly_flat(norm))
    vector = {"random": np.random.default_rng(3).normal(size=N), "leading": right[:, 0]}.get(
        start, right[:, 20]
    )
    square, found = squared_norm(jnp.asarray(a.T @ a), jnp.float32(vector))
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)
    # A norm of 1.002 is too near the others for the filter.
    assert np.sqrt(square) == pytest.approx(norm, rel=1e-3 if norm > 1.002 else 2e-3)
    assert np.linalg.norm(into_ball(a, jnp.float32(vector)), 2) <= 1.002


def test_reflection_keeps_what_is_inside_and_turns_back_what_is_not():
    values = np.concatenate(
        [np.linspace(0, 0.9, N // 3), np.ones(N // 3), np.linspace(1, 1.25, N - 2 * (N // 3))]
    )
    a, right = with_singular_values(values)
    q = reflection(jnp.asarray(a.T @ a), jnp.float32(1.25**2))
    found = np.diag(right.T @ np.asarray(q, np.float64) @ right) * values
    inside, outside = values < 1, values > 1
    np.testing.assert_allclose(found[values == 1], 1, atol=1e-4)
    np.testing.assert_allclose(found[inside], values[inside], atol=0.08)
    assert (found[outside] < 1).all()
    np.testing.assert_allclose(found[outside], 2 - values[outside], atol=0.08)


def test_reflection_of_a_long_matrix_is_finite():
    a, _ = with_singular_values(nearly_flat(60))
    reflected = a @ np.asarray(reflection(jnp.asarray(a.T @ a), jnp.float32(3600)))
    assert np.linalg.norm(reflected, 2) <= 60
