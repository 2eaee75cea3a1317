"""The matrix sign against NumPy's float64 SVD."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spectral import msign

METHODS = ("polar_express", "muon", "svd")
SHAPES = ((6, 4), (4, 6), (5, 5), (1, 7), (1, 1), (3, 6, 4), (2, 1, 2, 4, 6))

jit_msign = jax.jit(msign, static_argnames=("method", "steps", "dtype"))


def polar(x: np.ndarray) -> np.ndarray:
    """U V^T in float64, singular values below 1e-10 of the largest counted as zero."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return (u * (s > 1e-10 * s[..., :1])[..., None, :]) @ vt


def conditioned(rng: np.random.Generator, shape: tuple[int, ...], low: float = 0.3) -> np.ndarray:
    """Random matrices with singular values between low and 1, float32."""
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = rng.uniform(low, 1.0, (*shape[:-2], 1, min(shape[-2:])))
    return ((u * s) @ vt).astype(np.float32)


def orthogonal(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(n, n)))[0].astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", ["polar_express", "svd"])
def test_msign_is_the_polar_factor(method, shape):
    x = conditioned(np.random.default_rng(0), shape)
    found = jit_msign(x, method=method)
    chex.assert_shape(found, shape)
    np.testing.assert_allclose(found, polar(x), atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_quintic_is_its_polynomial_on_singular_values(shape):
    x = conditioned(np.random.default_rng(1), shape)
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    found = jit_msign(x, method="muon", steps=5)
    np.testing.assert_allclose(found, (u * s[..., None, :]) @ vt, atol=2e-5)
    assert ((s > 0.65) & (s < 1.25)).all()


def test_polar_express_over_three_decades():
    """Singular values from ||x||_F down to 1e-3 of it all come out as 1."""
    rng = np.random.default_rng(2)
    s = np.geomspace(1e-3, 1.0, 16)
    s = s / np.linalg.norm(s)
    x = ((orthogonal(rng, 48)[:, :16] * s) @ orthogonal(rng, 16)).astype(np.float32)
    found = np.asarray(jit_msign(x), np.float64)
    np.testing.assert_allclose(np.linalg.svd(found, compute_uv=False), 1.0, atol=1e-5)
    # float32 knows the direction of a singular value of 1e-3 to about 6e-8 / 1e-3.
    np.testing.assert_allclose(found, polar(x), atol=1e-3)


def test_compiled_msign_of_small_matrices():
    """The iteration doubles any difference between the y in a y and the y in y (b G + c G^2), every step.

    Which shapes suffer depends on the JAX version: (1, 4, 3) in 0.10.2, the others in 0.12.0.
    """
    rng = np.random.default_rng(0)
    for shape in ((1, 4, 3), (1, 6, 4), (1, 8, 8), (2, 1, 2, 6, 4)):
        x = conditioned(rng, shape)
        np.testing.assert_allclose(jit_msign(x), polar(x), atol=3e-6, err_msg=str(shape))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(4, 6), (3, 6, 4)], ids=str)
def test_msign_of_zero_is_zero(method, shape):
    np.testing.assert_array_equal(jit_msign(jnp.zeros(shape), method=method), 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_zero_beside_others_in_a_batch(method):
    x = conditioned(np.random.default_rng(3), (3, 6, 4))
    alone = jit_msign(x, method=method)
    found = jit_msign(x * np.array([1.0, 0.0, 1.0], np.float32)[:, None, None], method=method)
    np.testing.assert_allclose(found, np.asarray(alone) * np.array([1, 0, 1])[:, None, None], atol=1e-6)


@pytest.mark.parametrize("method", ["polar_express", "svd"])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (8, 8)], ids=str)
def test_msign_rank_deficient(method, shape):
    rng = np.random.default_rng(4)
    rank = 3
    x = (conditioned(rng, (shape[0], rank)) @ conditioned(rng, (rank, shape[1]))).astype(np.float32)
    u, _, vt = np.linalg.svd(x.astype(np.float64))
    expected = u[:, :rank] @ vt[:rank]
    # Rounding puts 1e-8 where the zeros are, which the polynomials raise by up to 2e4.
    np.testing.assert_allclose(jit_msign(x, method=method), expected, atol=2e-3 if method != "svd" else 3e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_matrix_does_not_touch_the_others(method, bad):
    x = conditioned(np.random.default_rng(5), (3, 6, 4))
    expected = np.array(jit_msign(x, method=method))
    x[1, 2, 3] = bad
    found = np.array(jit_msign(x, method=method))
    np.testing.assert_allclose(found[[0, 2]], expected[[0, 2]], atol=1e-6)
    assert not np.isfinite(found[1]).all()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(6, 4), (4, 6), (5, 5), (1, 7)]),
    exponent=st.floats(-30, 30),
    method=st.sampled_from(METHODS),
)
def test_msign_properties(seed, shape, exponent, method):
    rng = np.random.default_rng(seed)
    x = conditioned(rng, shape)
    q, r = orthogonal(rng, shape[0]), orthogonal(rng, shape[1])
    sign = partial(jit_msign, method=method)
    found = np.asarray(sign(x))
    tight = dict(atol=2e-5)
    scaled = x * np.float32(10.0**exponent)
    np.testing.assert_allclose(sign(scaled), found, err_msg="scale", **tight)
    np.testing.assert_allclose(sign(-x), -found, err_msg="odd", **tight)
    np.testing.assert_allclose(sign(x.T), found.T, err_msg="transpose", **tight)
    np.testing.assert_allclose(sign(q @ x @ r), q @ found @ r, err_msg="equivariance", **tight)


@pytest.mark.parametrize("method", METHODS)
def test_batch_is_a_loop(method):
    x = conditioned(np.random.default_rng(6), (2, 3, 6, 4))
    # Scales far apart: every matrix must be normalised by its own norm.
    x *= 10.0 ** np.array([[-20, 0, 20], [5, -5, 0]], np.float32)[..., None, None]
    loop = np.stack([[jit_msign(matrix, method=method) for matrix in row] for row in x])
    np.testing.assert_allclose(jit_msign(x, method=method), loop, atol=1e-5)
    vmapped = jax.vmap(jax.vmap(partial(msign, method=method)))(x)
    np.testing.assert_allclose(vmapped, loop, atol=1e-5)


@pytest.mark.parametrize("method", ["polar_express", "svd"])
def test_msign_bfloat16_input(method):
    x = jnp.asarray(conditioned(np.random.default_rng(7), (3, 6, 4)), jnp.bfloat16)
    found = jit_msign(x, method=method)
    assert found.dtype == jnp.bfloat16
    # Computed in float32, rounded once: half a unit in the last of 8 bits.
    np.testing.assert_allclose(found.astype(jnp.float32), polar(np.asarray(x, np.float64)), atol=2.0**-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)], ids=str)
def test_msign_bfloat16_products(dtype, shape):
    x = jnp.asarray(conditioned(np.random.default_rng(8), shape), dtype)
    found = jit_msign(x, dtype=jnp.bfloat16)
    assert found.dtype == dtype
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found, polar(np.asarray(x, np.float64)), atol=0.05)
    assert np.abs(found - polar(np.asarray(x, np.float64))).max() > 1e-5, "the products were not bfloat16"
    assert np.linalg.norm(found, 2) < 1.05


def test_msign_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(conditioned(np.random.default_rng(9), (3, 8, 6)), jnp.float64)
        for method in ("polar_express", "svd"):
            found = msign(x, method=method)
            assert found.dtype == jnp.float64
            np.testing.assert_allclose(found, polar(np.asarray(x)), atol=1e-9)


@pytest.mark.parametrize("method", ["polar_express", "svd"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_msign_gradient(method, shape):
    """The derivative along a direction against central differences of the float64 polar factor."""
    rng = np.random.default_rng(10)
    x, dx, weight = conditioned(rng, shape), rng.normal(size=shape), rng.normal(size=shape)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(weight.astype(np.float32) * msign(x, method=method))))(x)
    assert np.isfinite(gradient).all()
    h = 1e-6
    expected = np.sum(weight * (polar(x + h * dx) - polar(x - h * dx))) / (2 * h)
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * dx), expected, rtol=2e-3, atol=2e-3)


def test_msign_gradient_of_the_muon_quintic_is_finite():
    x = conditioned(np.random.default_rng(11), (2, 6, 4))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(msign(x, method="muon", steps=5)[..., 0])))(x)
    assert np.isfinite(gradient).all()


def test_msign_errors():
    with pytest.raises(ValueError, match=r"at least 2 axes; got shape \(3,\)"):
        msign(jnp.ones(3))
    with pytest.raises(ValueError, match="unknown msign method 'newton': choose polar_express, muon or svd"):
        msign(jnp.eye(3), method="newton")
    for method in ("polar_express", "muon"):
        with pytest.raises(ValueError, match="at least one step is needed, got 0"):
            msign(jnp.eye(3), method=method, steps=0)


def test_svd_checks_steps_too():
    with pytest.raises(ValueError, match="at least one step"):
        msign(jnp.eye(3), method="svd", steps=0)


def test_msign_of_integers_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        msign(jnp.array([[1, 2], [3, 4]]))


@pytest.mark.parametrize("method", METHODS)
def test_msign_over_a_mesh(method):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = conditioned(np.random.default_rng(22), (8, 6, 4))
    expected = jit_msign(x, method=method)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        mapped = jax.shard_map(partial(msign, method=method), in_specs=P("data"), out_specs=P("data"))
        np.testing.assert_allclose(jax.jit(mapped)(sharded), expected, atol=1e-5)
        np.testing.assert_allclose(jit_msign(sharded, method=method), expected, atol=1e-5)
