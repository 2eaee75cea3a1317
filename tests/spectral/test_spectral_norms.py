"""Spectral norms, exact and by power iteration, against NumPy's float64 SVD."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spectral import power_iteration, spectral_norm
from spectral.matrix_functions import svd

SHAPES = ((6, 4), (4, 6), (5, 5), (1, 7), (1, 1), (3, 6, 4), (2, 1, 2, 4, 6))

jit_power = jax.jit(power_iteration, static_argnames="iterations")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spectral_norm(shape):
    x = np.random.default_rng(13).normal(size=shape).astype(np.float32)
    expected = np.linalg.svd(x.astype(np.float64), compute_uv=False)[..., 0]
    found = spectral_norm(jnp.asarray(x))
    chex.assert_shape(found, shape[:-2])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_power_iteration_converges(shape):
    rng = np.random.default_rng(14)
    u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = 3.0 * 0.6 ** np.arange(s.shape[-1])
    x = ((u * s) @ vt).astype(np.float32)
    norm, v = jit_power(x, iterations=30)
    chex.assert_shape([norm, v], [shape[:-2], (*shape[:-2], shape[-1])])
    np.testing.assert_allclose(norm, np.full(shape[:-2], 3.0), rtol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(np.asarray(v) * vt[..., 0, :], axis=-1)), 1.0, rtol=1e-5)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(6, 4), (2, 5, 5)]))
def test_power_iteration_is_a_growing_lower_bound(seed, shape):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    norm = np.linalg.svd(x.astype(np.float64), compute_uv=False)[..., 0]
    estimates = np.stack([jit_power(x, iterations=k)[0] for k in (1, 2, 10)])
    assert (estimates <= norm * (1 + 1e-5)).all()
    assert (np.diff(estimates, axis=0) >= -1e-5 * norm).all()


def test_power_iteration_error_bound():
    """With s_2 / s_1 = 1/2 the relative error falls by (1/2)^4 an iteration."""
    x = np.diag([1.0, 0.5]).astype(np.float32)
    start = np.array([1.0, 4.0], np.float32)
    for k in (1, 2, 3):
        tangent = 4.0 * 0.25**k  # of the angle between v and the first singular vector
        expected = np.sqrt((1 + (0.5 * tangent) ** 2) / (1 + tangent**2))
        np.testing.assert_allclose(jit_power(x, start, iterations=k)[0], expected, rtol=1e-6)


def test_power_iteration_warm_start():
    x = np.random.default_rng(15).normal(size=(2, 8, 8)).astype(np.float32)
    v, norm = None, None
    for _ in range(60):
        norm, v = jit_power(x, v, iterations=2)
    np.testing.assert_allclose(norm, np.linalg.svd(x, compute_uv=False)[..., 0], rtol=1e-3)


def test_power_iteration_ignores_the_scale_of_v():
    x = np.random.default_rng(16).normal(size=(5, 4)).astype(np.float32)
    v = np.random.default_rng(17).normal(size=4).astype(np.float32)
    reference = jit_power(x, v, iterations=3)
    for scale in (1e-30, 1e30):
        chex.assert_trees_all_close(jit_power(x, v * np.float32(scale), iterations=3), reference, rtol=1e-5)


def test_norms_of_zero_matrices():
    x = jnp.zeros((2, 4, 3))
    np.testing.assert_array_equal(spectral_norm(x), 0.0)
    norm, v = jit_power(x)
    np.testing.assert_array_equal(norm, 0.0)
    np.testing.assert_array_equal(v, 0.0)


def test_power_iteration_of_centred_rows():
    """Its default start must not be orthogonal to a matrix whose rows sum to zero."""
    x = np.random.default_rng(18).normal(size=(6, 4)).astype(np.float32)
    x -= x.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(jit_power(x, iterations=60)[0], np.linalg.norm(x, 2), rtol=1e-3)


def test_norms_of_bfloat16_are_float32():
    x = jnp.asarray(np.random.default_rng(19).normal(size=(6, 4)), jnp.bfloat16)
    assert spectral_norm(x).dtype == jnp.float32
    assert jit_power(x)[0].dtype == jnp.float32


def test_power_iteration_needs_an_iteration():
    with pytest.raises(ValueError, match="at least one step is needed, got 0"):
        power_iteration(jnp.eye(3), iterations=0)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_power_iteration_at_any_scale(scale):
    x = np.random.default_rng(20).normal(size=(6, 4)).astype(np.float32)
    reference = np.asarray(jit_power(x, iterations=10)[0], np.float64)
    found = np.asarray(jit_power(x * np.float32(scale), iterations=10)[0], np.float64)
    np.testing.assert_allclose(found / scale, reference, rtol=1e-4)


@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
def test_power_iteration_over_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(21).normal(size=(8, 6, 4)).astype(np.float32)
    expected = jit_power(x)[0]
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        estimate = lambda x: power_iteration(x)[0]  # noqa: E731
        if kind == "shard_map":
            estimate = jax.shard_map(estimate, in_specs=P("data"), out_specs=P("data"))
        found = jax.jit(estimate)(sharded)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---------------------------------------------------------------------------- SVD


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 6), (2, 3, 4, 4)], ids=str)
def test_svd(shape):
    x = np.random.default_rng(30).normal(size=shape).astype(np.float32)
    u, s, vt = svd(jnp.asarray(x))
    np.testing.assert_allclose((u * s[..., None, :]) @ vt, x, atol=1e-5)
    np.testing.assert_allclose(s, np.linalg.svd(x.astype(np.float64), compute_uv=False), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(svd(jnp.asarray(x), compute_uv=False), s, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the hang is the CPU backend's")
def test_svd_never_waits_for_xlas_thread_pool():
    """A batched LAPACK call waits inside the pool for the pool, and two at once can hang."""
    program = jax.jit(svd).lower(jnp.ones((3, 2, 6, 5))).compile().as_text()
    calls = [line for line in program.splitlines() if "lapack_sgesdd_ffi" in line and "custom-call" in line]
    assert calls
    for call in calls:
        assert "operand_layout_constraints={f32[6,5]" in call, call
