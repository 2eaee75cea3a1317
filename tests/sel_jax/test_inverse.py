"""Raw weights and back over twelve decades, the mismatched start's closed form, maps without an inverse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sel_jax import SymExpLin, invert
from sel_jax.symexplin import RULES
from tests.sel_jax import map_oracle as oracle

rules = pytest.mark.parametrize("rule", RULES)
COUNT = 240
# |r| <= 1/2, where the paths' sum is at most three times their difference.
MAPS = [
    (2.0, {}),
    (4.3, {}),
    (12.5, {}),
    (2.0, {"e": 1.5, "l": 0.7, "m": 0.8, "n": 0.1}),
    (0.8, {"e": 2.0, "l": 0.5, "n": -0.3}),
    (1.0, {"l": 0.0}),
    (3.0, {"l": -1.0}),
]
maps = pytest.mark.parametrize(("beta", "constants"), MAPS, ids=str)
magnitudes = st.lists(st.floats(-9, 3), min_size=COUNT, max_size=COUNT)


@functools.cache
def round_trip(config: SymExpLin):
    return jax.jit(lambda weights: (raw := invert(weights, config), config(raw)))


def assert_inverse(beta, rule, constants, weights):
    raw, back = round_trip(SymExpLin(beta, rule, **constants))(weights)
    assert raw.dtype == jnp.float32
    np.testing.assert_allclose(back, weights, rtol=2e-6)
    # The inverse itself: what the map does to the raw weights in exact arithmetic.
    np.testing.assert_allclose(oracle.effective(raw, beta, rule, **constants), weights, rtol=2e-6)
    np.testing.assert_array_equal(np.sign(raw), np.sign(weights))


@rules
@maps
def test_twelve_decades(beta, constants, rule):
    size = np.geomspace(1e-9, 1e3, COUNT // 2, dtype=np.float32)
    assert_inverse(beta, rule, constants, np.concatenate([size, -size]))


@rules
@settings(max_examples=15, deadline=None)
@given(magnitudes, st.integers(0, 2**31))
def test_any_weights(rule, powers, seed):
    signs = np.random.default_rng(seed).choice([-1, 0, 1], COUNT)
    assert_inverse(4.3, rule, {}, np.float32(signs * 10.0 ** np.array(powers)))


@rules
def test_against_bisection(rule):
    rng = np.random.default_rng(0)
    weights = np.float32(rng.choice([-1, 1], COUNT) * 10 ** rng.uniform(-6, 2, COUNT))
    raw, _ = round_trip(SymExpLin(4.3, rule))(weights)
    np.testing.assert_allclose(raw, oracle.inverse(weights, 4.3, rule), rtol=2e-6)


@rules
def test_beyond_the_saturation(rule):
    beta = 2.0
    w = np.array([25.0, -25.0, 1e3, -1e4, 1e6])
    weights = np.float32(oracle.effective(w, beta, rule))
    raw, _ = round_trip(SymExpLin(beta, rule))(weights)
    np.testing.assert_allclose(raw, w, rtol=1e-6)


@rules
def test_scales_that_are_arrays(rule):
    rng = np.random.default_rng(1)
    scales = {
        name: tuple(rng.uniform(0.8, 1.2, shape).astype(np.float32) for shape in ((12, 1), (1, 20)))
        for name in ("e", "l", "m", "n")
    }
    weights = np.float32(rng.normal(size=(12, 20)) * 10 ** rng.uniform(-5, 1, (12, 20)))
    config = SymExpLin(12.5, rule)
    raw = jax.jit(functools.partial(invert, config=config))(weights, scales=scales)
    np.testing.assert_array_equal(raw, raw)
    values = {name: oracle.product(pair) for name, pair in scales.items()}
    np.testing.assert_allclose(oracle.effective(raw, 12.5, rule, **values), weights, rtol=2e-6)


@rules
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_comes_back_to_the_bit(rule, dtype):
    size = jnp.geomspace(1e-3, 10, COUNT // 2)
    weights = jnp.concatenate([size, -size]).astype(dtype)
    _, back = round_trip(SymExpLin(3.0, rule))(weights)
    np.testing.assert_array_equal(back.astype(dtype), weights)


def test_the_inverse_near_the_edge():
    """Up to r = -0.999 the error is still rounding's, times (1 + |r|) / (1 - |r|)."""
    for r in (0.9, 0.99, 0.999):
        config = SymExpLin(1.0, l=r)
        size = np.geomspace(1e-6, 1e2, COUNT // 2, dtype=np.float32)
        weights = np.concatenate([size, -size])
        raw, _ = round_trip(config)(weights)
        found = oracle.effective(raw, 1.0, l=np.float64(np.float32(r)))
        np.testing.assert_allclose(found, weights, rtol=4e-7 * (1 + r) / (1 - r))


# ---------------------------------------------------------------------------- the mismatched start


@pytest.mark.parametrize("beta", [0.5, 2.0, 12.5])
def test_mismatched_start(beta):
    """The congruent rule inverted, the mismatch rule applied: negative weights lose twice their L."""
    rng = np.random.default_rng(2)
    weights = rng.normal(size=COUNT).astype(np.float32)
    config = SymExpLin(beta)
    raw = invert(weights, config, rule="congruent")
    np.testing.assert_array_equal(raw, invert(weights, SymExpLin(beta, "congruent")))
    found = np.asarray(config(raw), np.float64)
    expected = np.where(weights > 0, weights, weights + 2 / beta * np.abs(np.float64(raw)))
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(weights).max())
    negative = weights < 0
    assert (found[negative] > weights[negative]).all()
    if beta >= 2:
        assert (found[negative] < 0).all()


# ---------------------------------------------------------------------------- no inverse


@pytest.mark.parametrize(
    ("beta", "rule", "constants"),
    [
        (0.5, "mismatch", {}),
        (1.0, "mismatch", {}),
        (3.0, "mismatch", {"n": 2.0}),
        (3.0, "mismatch", {"l": -4.0}),
        (3.0, "congruent", {"l": -4.0}),
        (3.0, "congruent", {"e": -1.0}),
        (3.0, "mismatch", {"e": 0.0}),
        (3.0, "mismatch", {"m": 0.0}),
        (3.0, "mismatch", {"m": -1.0}),
        (3.0, "mismatch", {"l": float("nan")}),
    ],
    ids=str,
)
def test_maps_without_an_inverse(beta, rule, constants):
    """Constants are looked at while tracing too."""
    config = SymExpLin(beta, rule, **constants)
    for function in (invert, jax.jit(invert, static_argnums=1)):
        with pytest.raises(ValueError, match=f"the {rule} map with beta = {beta:g} is not invertible"):
            function(jnp.ones(3), config)


def test_the_congruent_rule_bears_any_linear_path():
    for config in (SymExpLin(0.5, "congruent"), SymExpLin(0.5, "congruent", l=10.0)):
        weights = jnp.array([1e-6, -0.2, 3.0])
        np.testing.assert_allclose(config(invert(weights, config)), weights, rtol=1e-6)


def test_arrays_of_scales_without_an_inverse():
    config = SymExpLin(3.0)
    scales = {"e": (jnp.array([[1.0], [-1.0]]), jnp.ones((1, 2)))}
    weights = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="not invertible with these scales"):
        invert(weights, config, scales)
    raw = jax.jit(lambda scales: invert(weights, config, scales))(scales)
    np.testing.assert_array_equal(np.isnan(raw), [[False, False], [True, True]])
