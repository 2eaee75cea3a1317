"""The polar retraction against NumPy's float64 SVD, near and far."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spectral import polar_retraction

# Compiled as it is outside the tests: without LLVM's optimisations, rounding alone may reach the bound below.
optimized = jax.jit(polar_retraction, compiler_options={"xla_backend_optimization_level": 3})


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def departed(seed: int, shape: tuple[int, ...], eta: float) -> np.ndarray:
    """Orthonormal columns plus eta times a matrix of spectral norm 1, in float32."""
    rng = np.random.default_rng(seed)
    step = rng.normal(size=shape)
    step /= np.linalg.norm(step, 2, axis=(-2, -1))[..., None, None]
    return (polar(rng.normal(size=shape)) + eta * step).astype(np.float32)


def violation(x: np.ndarray) -> np.ndarray:
    """RMS of X^T X - I."""
    x = np.asarray(x, np.float64)
    return np.linalg.norm(np.swapaxes(x, -1, -2) @ x - np.eye(x.shape[-1]), axis=(-2, -1)) / x.shape[-1]


@pytest.mark.parametrize("eta", [0.0, 1e-3, 4e-3, 0.02, 0.1, 0.3, 0.7, 3.0, 100.0, 1e9, 1e18, 1e30])
@pytest.mark.parametrize("shape", [(3, 24, 8), (16, 16), (1, 5, 1)], ids=str)
def test_polar_factor_from_any_distance(shape, eta):
    x = departed(0, shape, eta)
    found = polar_retraction(x)
    condition = np.linalg.cond(x).max()
    np.testing.assert_allclose(found, polar(x), atol=2e-6 * condition)
    assert violation(found).max() < 3e-7


@pytest.mark.parametrize("eta", [0.02, 0.1])
@pytest.mark.parametrize("shape", [(600, 300), (260, 260)], ids=str)
def test_tangent_steps_of_large_matrices(shape, eta):
    rng = np.random.default_rng(1)
    w = polar(rng.normal(size=shape))
    a = rng.normal(size=shape)
    a -= w @ (w.T @ a + a.T @ w) / 2
    x = (w + eta * a / np.linalg.norm(a, 2)).astype(np.float32)
    found = polar_retraction(x)
    np.testing.assert_allclose(found, polar(x), atol=1e-6)
    assert violation(found) < 1e-7


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-6, 6), columns=st.integers(1, 9))
def test_scaled_and_skewed_columns(seed, exponent, columns):
    x = departed(seed, (9, columns), 0.2) * np.float32(10.0**exponent)
    found = optimized(x)
    np.testing.assert_allclose(found, polar(x), atol=1e-5)
    assert violation(found) < 5e-7


def test_one_far_matrix_in_a_batch():
    x = np.stack([departed(2, (12, 6), eta) for eta in (1e-3, 0.1, 2.0)])
    for members in ([0], [0, 1], [0, 1, 2]):
        np.testing.assert_allclose(polar_retraction(x[members]), polar(x[members]), atol=2e-5)
    np.testing.assert_allclose(jax.vmap(polar_retraction)(x), polar(x), atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_bad_matrix_does_not_touch_the_others(bad):
    x = np.stack([departed(3, (12, 6), eta) for eta in (0.02, 0.5, 0.02)])
    x[2, 3, 4] = bad
    found = np.asarray(polar_retraction(x))
    np.testing.assert_allclose(found[:2], polar(x[:2]), atol=1e-5)
    assert np.isfinite(found[2]).all() == (bad == 1e30)


def test_rank_deficient_stays_finite():
    x = departed(4, (12, 6), 0.1)
    x[:, 2] = x[:, 3]
    found = np.asarray(polar_retraction(x), np.float64)
    assert np.isfinite(found).all() and np.linalg.norm(found, 2) < 1 + 1e-5
    np.testing.assert_array_equal(polar_retraction(0 * x), 0)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0), (2, 3, 0)], ids=str)
def test_nothing_to_retract(shape):
    assert polar_retraction(jnp.zeros(shape)).shape == shape


def flops(shape: tuple[int, int]) -> float:
    """FLOPs of the products in the first case, from its own branch of the jaxpr."""
    closed = jax.make_jaxpr(polar_retraction)(jax.ShapeDtypeStruct(shape, jnp.float32))
    total = 0.0

    def count(jaxpr):
        nonlocal total
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                terms = equation.invars[0].aval.shape[contracted[0]]
                total += 2 * terms * np.prod(equation.outvars[0].aval.shape)
            elif equation.primitive.name == "cond":
                count(equation.params["branches"][0].jaxpr)
            elif "jaxpr" in equation.params:
                inner = equation.params["jaxpr"]
                count(getattr(inner, "jaxpr", inner))

    count(closed.jaxpr)
    return total


def test_a_small_step_costs_a_gram_matrix_and_a_product():
    m, n = 1024, 512
    assert flops((m, n)) == 3.5 * m * n**2 + 1.5 * n**3


def test_no_lapack_and_no_collective():
    mesh = jax.make_mesh((8,), ("stack",), axis_types=(AxisType.Explicit,))
    x = departed(5, (8, 12, 6), 0.1)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("stack")))
        mapped = jax.jit(jax.shard_map(polar_retraction, in_specs=P("stack"), out_specs=P("stack")))
        np.testing.assert_allclose(mapped(sharded), polar(x), atol=1e-5)
        np.testing.assert_allclose(polar_retraction(sharded), polar(x), atol=1e-5)
        program = mapped.lower(sharded).compile().as_text()
    for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "custom-call"):
        assert word not in program, word


@pytest.mark.parametrize("eta", [0.01, 0.1, 1.0])
def test_gradient(eta):
    rng = np.random.default_rng(6)
    x, dx, weight = (
        departed(7, (8, 5), eta).astype(np.float64),
        rng.normal(size=(8, 5)),
        rng.normal(size=(8, 5)),
    )
    gradient = jax.grad(lambda x: jnp.sum(weight.astype(np.float32) * polar_retraction(x)))(
        x.astype(np.float32)
    )
    h = 1e-6
    expected = np.sum(weight * (polar(x + h * dx) - polar(x - h * dx))) / (2 * h)
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * dx), expected, rtol=2e-3, atol=2e-3)


def test_float64_is_exact():
    with jax.enable_x64(True):
        for eta in (1e-6, 1e-3, 0.1, 0.6, 2.0):
            x = jnp.asarray(departed(8, (9, 5), eta), jnp.float64)
            np.testing.assert_allclose(polar_retraction(x), polar(x), atol=1e-12)


def test_bfloat16_is_rounded_once():
    x = jnp.asarray(departed(9, (9, 5), 0.1), jnp.bfloat16)
    found = polar_retraction(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), polar(np.asarray(x, np.float64)), atol=2.0**-9)


def test_thousand_steps_do_not_drift():
    shape, eta = (24, 12), 0.02

    def step(w, key):
        a = jax.random.normal(key, shape)
        a -= w @ (w.T @ a + a.T @ w) / 2
        w = polar_retraction(w + eta * a / jnp.linalg.norm(a, 2))
        return w, w

    keys = jax.random.split(jax.random.key(0), 1000)
    _, path = jax.jit(partial(jax.lax.scan, step))(departed(10, shape, 0.0), keys)
    assert violation(path).max() < 3e-7
    assert np.linalg.norm(np.asarray(path[-1] - path[0])) > 0.5


def test_errors():
    with pytest.raises(ValueError, match=r"at least as many rows, got shape \(2, 3\): transpose it"):
        polar_retraction(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="polar_retraction needs matrices"):
        polar_retraction(jnp.ones(3))
    with pytest.raises(TypeError, match="got int32: cast them first"):
        polar_retraction(jnp.ones((3, 2), int))
