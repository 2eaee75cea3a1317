"""Initialisers: singular values and norms measured with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from spectral import embedding_normal, embedding_orthogonal, spectral_normal, spectral_orthogonal

RATIOS = ((64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64))
KEY = jax.random.key(0)


def singular_values(x: jax.Array) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


@pytest.mark.parametrize("shape", RATIOS, ids=str)
def test_spectral_normal(shape):
    x = spectral_normal()(KEY, shape)
    target = np.sqrt(shape[1] / shape[0])
    assert singular_values(x)[0] == pytest.approx(target, rel=0.1)
    sigma = target / (np.sqrt(shape[0]) + np.sqrt(shape[1]))
    assert np.std(x) == pytest.approx(sigma, rel=0.02)
    assert abs(np.mean(x)) < 4 * sigma / np.sqrt(x.size)


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64)], ids=str)
def test_simplified(shape):
    """Parametrization 1: sigma = min(1, sqrt(out / in)) / sqrt(in), with a norm of up to twice the target."""
    x = spectral_normal(simplified=True)(KEY, shape)
    sigma = min(1, np.sqrt(shape[1] / shape[0])) / np.sqrt(shape[0])
    assert np.std(x) == pytest.approx(sigma, rel=0.02)
    norm = singular_values(x)[0]
    assert norm == pytest.approx(sigma * (np.sqrt(shape[0]) + np.sqrt(shape[1])), rel=0.1)


@pytest.mark.parametrize("shape", RATIOS, ids=str)
def test_spectral_orthogonal(shape):
    s = singular_values(spectral_orthogonal()(KEY, shape))
    np.testing.assert_allclose(s, np.sqrt(shape[1] / shape[0]), rtol=1e-5)


@pytest.mark.parametrize("make", [spectral_normal, spectral_orthogonal])
def test_gain_and_dtype(make):
    plain = make()(KEY, (32, 16))
    np.testing.assert_allclose(make(gain=3.0)(KEY, (32, 16)), 3 * plain, rtol=1e-6)
    low = make()(KEY, (32, 16), jnp.bfloat16)
    assert plain.dtype == jnp.float32 and low.dtype == jnp.bfloat16
    assert singular_values(low)[0] == pytest.approx(np.sqrt(0.5), rel=0.15)


@pytest.mark.parametrize(
    ("shape", "dims", "to_batch"),
    [
        ((3, 64, 16), MuonDimensionNumbers(-2, -1), lambda x: x),
        ((16, 64), MuonDimensionNumbers(-1, -2), lambda x: x.T[None]),
        ((2, 64, 3, 16), MuonDimensionNumbers(1, 3), lambda x: np.moveaxis(x, 2, 1).reshape(6, 64, 16)),
        ((2, 64, 3, 16), MuonDimensionNumbers(1, (2, 3)), lambda x: x.reshape(2, 64, 48)),
        ((3, 3, 16, 64), MuonDimensionNumbers((0, 1, 2), 3), lambda x: x.reshape(1, 144, 64)),
    ],
    ids=lambda x: None if callable(x) else str(x),  # a function's str is an address, another in each process
)
def test_dimension_numbers(shape, dims, to_batch):
    """The norm counts for each matrix on its own, whatever the layout, and no two of them are alike."""
    for make, tolerance in ((spectral_normal, 0.2), (spectral_orthogonal, 1e-5)):
        x = make(dimension_numbers=dims)(KEY, shape)
        assert x.shape == shape
        batch = to_batch(np.asarray(x, np.float64))
        fan_in, fan_out = batch.shape[1:]
        s = singular_values(batch)
        np.testing.assert_allclose(s[:, 0], np.sqrt(fan_out / fan_in), rtol=tolerance)
        if make is spectral_orthogonal:
            np.testing.assert_allclose(s, np.sqrt(fan_out / fan_in), rtol=tolerance)
        flat = batch.reshape(len(batch), -1)
        cosines = np.corrcoef(flat) - np.eye(len(flat)) if len(flat) > 1 else np.zeros(1)
        assert np.abs(cosines).max() < 6 / np.sqrt(fan_in * fan_out)


@pytest.mark.parametrize("make", [spectral_normal, spectral_orthogonal, embedding_normal])
def test_keys_decide_and_jit_agrees(make):
    init = make()
    x = init(KEY, (8, 6), jnp.float32)
    np.testing.assert_array_equal(x, init(KEY, (8, 6), jnp.float32))
    assert np.abs(x - init(jax.random.key(1), (8, 6), jnp.float32)).max() > 0.01
    jitted = jax.jit(init, static_argnums=(1, 2))(KEY, (8, 6), jnp.float32)
    np.testing.assert_allclose(jitted, x, atol=1e-6)


def test_embedding_normal():
    """One-hot inputs: it is the rows that have norm sqrt(features), whatever the vocabulary."""
    for vocabulary in (100, 1000):
        rows = np.linalg.norm(embedding_normal()(KEY, (vocabulary, 256)), axis=1)
        np.testing.assert_allclose(rows, 16.0, rtol=0.2)
        assert np.sqrt(np.mean(rows**2)) == pytest.approx(16.0, rel=0.02)
    plain, scaled = embedding_normal()(KEY, (10, 8)), embedding_normal(gain=0.5)(KEY, (10, 8))
    np.testing.assert_allclose(scaled, 0.5 * plain, rtol=1e-6)


@pytest.mark.parametrize("make", [spectral_normal, spectral_orthogonal])
def test_errors(make):
    with pytest.raises(ValueError, match=r"does not fit an array of shape \(4,\)"):
        make()(KEY, (4,))
    with pytest.raises(ValueError, match="twice"):
        make(dimension_numbers=MuonDimensionNumbers(1, -1))(KEY, (4, 6))


def test_orthogonal_embeddings_have_rows_of_one_norm():
    rows = embedding_orthogonal(gain=2.0)(jax.random.key(0), (50, 9))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 2 * 3.0, rtol=1e-6)
    cosines = (rows @ rows.T) / 36
    assert np.abs(cosines[~np.eye(50, dtype=bool)]).mean() < 2 / 9**0.5  # directions of their own


def test_orthogonal_kernels_are_as_exact_as_their_dtype():
    with jax.enable_x64(True):
        w = np.asarray(spectral_orthogonal()(jax.random.key(0), (6, 6), np.float64))
    np.testing.assert_allclose(w @ w.T, np.eye(6), atol=1e-14)
