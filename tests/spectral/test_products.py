"""Symmetric products against NumPy's in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectral import symmetric_product
from spectral.products import matmul


def gram_factors(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return np.swapaxes(x, -1, -2), x


def commuting(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two different polynomials of one symmetric matrix."""
    rng = np.random.default_rng(1)
    q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    s, t = rng.uniform(-1, 1, (2, n))
    return ((q * s) @ q.T).astype(np.float32), ((q * t) @ q.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 5, 4), (7, 7), (300, 257), (2, 3, 40, 256), (20, 301)], ids=str)
def test_gram_matrix(shape):
    a, b = gram_factors(shape)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    found = np.asarray(jax.jit(symmetric_product)(a, b))
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(found, np.swapaxes(found, -1, -2), atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("n", [1, 6, 255, 256, 259])
def test_commuting_symmetric_matrices(n):
    a, b = commuting(n)
    found = symmetric_product(a, b)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, atol=2e-6)


def test_three_quarters_of_the_flops():
    def flops(product, n):
        x = jax.ShapeDtypeStruct((n, n), jnp.float32)
        return jax.jit(product).lower(x, x).compile().cost_analysis()["flops"]

    assert flops(symmetric_product, 512) / flops(matmul, 512) == pytest.approx(0.75, abs=0.01)
    assert flops(symmetric_product, 64) == flops(matmul, 64)


@pytest.mark.parametrize("n", [6, 256])
def test_derivative_is_the_product_rule(n):
    a, b = (jnp.asarray(x) for x in commuting(n))
    _, found = jax.jvp(lambda a: symmetric_product(a, a), (a,), (b,))
    np.testing.assert_allclose(found, 2 * (np.asarray(a, np.float64) @ b), atol=1e-5)


@pytest.mark.parametrize("n", [6, 256])
def test_bfloat16_is_accumulated_in_float32(n):
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in gram_factors((400, n)))
    found = symmetric_product(a, b)
    assert found.dtype == jnp.float32
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_a_product_that_is_not_square_is_an_error():
    with pytest.raises(ValueError, match=r"square; got shapes \(2, 3\) and \(3, 4\)"):
        symmetric_product(jnp.ones((2, 3)), jnp.ones((3, 4)))
