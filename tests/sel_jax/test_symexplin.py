"""The map and its derivatives against NumPy in float64: signs, zeros, tiny weights, and the saturation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sel_jax import SATURATION, SCALES, SymExpLin, reparametrize
from sel_jax.symexplin import RULES
from tests.sel_jax import map_oracle as oracle

BETAS = (0.5, 1.0, 2.0, 4.3, 12.5)
SHAPE = (4, 5)
rules = pytest.mark.parametrize("rule", RULES)
betas = pytest.mark.parametrize("beta", BETAS)
some = settings(max_examples=25, deadline=None)
# Exponents k |w|: zeros, tiny ones, ordinary ones, and some beyond the saturation.
exponents = st.one_of(
    st.just(0.0),
    st.floats(-12, 0).map(lambda power: 10**power),
    st.floats(1e-12, 39.9),
    st.floats(40.1, 1e4),
)
signs = st.sampled_from([-1.0, 1.0])
matrices = st.lists(st.tuples(exponents, signs), min_size=20, max_size=20).map(
    lambda pairs: np.array([size * sign for size, sign in pairs]).reshape(SHAPE)
)


def vectors(shape: tuple[int, ...], low: float, high: float):
    size = int(np.prod(shape))
    hundredths = st.integers(round(100 * low), round(100 * high))
    numbers = st.lists(hundredths, min_size=size, max_size=size)
    return numbers.map(lambda x: np.float32(x).reshape(shape) / 100)


def pairs(low: float, high: float):
    return st.tuples(vectors((4, 1), low, high), vectors((1, 5), 0.5, 1.5))


# e of either sign, and m's exponents near the drawn ones.
factors = st.fixed_dictionaries(
    {"e": pairs(-2, 2), "l": pairs(-1, 2), "m": pairs(0.5, 1.5), "n": pairs(-1, 1)}
)


@functools.cache
def compiled(config: SymExpLin):
    """Jitted: the weights, and all derivatives of their sum weighted with a cotangent."""

    def total(w, scales, cotangent):
        weights = config(w, scales)
        return jnp.sum(cotangent * weights), weights

    gradients = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))

    def both(w, scales, cotangent):
        (by_weight, by_factor), weights = gradients(w, scales, cotangent)
        return weights, by_weight, by_factor

    return both


def tolerance(exponent, share: float = 8.0):
    """float32's: an exponent's rounding errors grow with it."""
    return 1e-6 * np.maximum(1.0, exponent / share)


def assert_near(found, expected, error):
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all()
    wrong = np.abs(found - expected) > error
    assert not wrong.any(), (found[wrong], np.broadcast_to(expected, found.shape)[wrong])


# ---------------------------------------------------------------------------- constant scales


@rules
@betas
@some
@given(matrices)
def test_weights_and_slopes(rule, beta, exponent):
    w = np.float32(exponent / beta)
    weights, slopes, _ = compiled(SymExpLin(beta, rule))(w, {}, jnp.ones(SHAPE))
    assert weights.dtype == jnp.float32
    expected, size = oracle.effective(w, beta, rule), sum(oracle.paths(w, beta))
    slope, steepest = oracle.by_weight(w, beta, rule)
    if beta >= 2:
        # Where the paths are subtracted, little is lost: what is left is half of the larger one or more.
        size, steepest = np.abs(expected), np.abs(slope)
    allowed = tolerance(beta * np.abs(np.float64(w)))
    assert_near(weights, expected, allowed * size)
    assert_near(slopes, slope, allowed * steepest)


@rules
@pytest.mark.parametrize("beta", [2.0, 4.3])
def test_a_dense_sweep(rule, beta):
    size = np.concatenate([np.geomspace(1e-12, 1, 2000), np.linspace(1, 60, 8000)]) / beta
    w = np.float32(np.concatenate([-size, size]))
    weights, slopes, _ = compiled(SymExpLin(beta, rule))(w, {}, jnp.ones(w.shape))
    allowed = tolerance(beta * np.abs(np.float64(w)))
    for found, expected in (
        (weights, oracle.effective(w, beta, rule)),
        (slopes, oracle.by_weight(w, beta, rule)[0]),
    ):
        assert_near(found, expected, allowed * np.abs(expected))


@rules
def test_derivatives_are_the_oracles_differences(rule):
    """The oracle's own derivatives, against its map's central differences."""
    rng = np.random.default_rng(0)
    w = rng.uniform(-3, 3, 200)
    beta, step = 2.5, 1e-6
    scales = {"e": 0.7, "l": 1.2, "m": 1.1, "n": 0.3}
    value = functools.partial(oracle.effective, beta=beta, rule=rule)
    difference = (value(w + step, **scales) - value(w - step, **scales)) / (2 * step)
    np.testing.assert_allclose(oracle.by_weight(w, beta, rule, **scales)[0], difference, rtol=1e-6, atol=1e-7)
    for name, found in oracle.by_scale(w, beta, rule, **scales).items():
        up, down = ({**scales, name: scales[name] + sign * step} for sign in (1, -1))
        difference = (value(w, **up) - value(w, **down)) / (2 * step)
        np.testing.assert_allclose(found, difference, rtol=1e-6, atol=1e-7)


@rules
@pytest.mark.parametrize("learned", [(), SCALES], ids=["constants", "arrays"])
def test_nothing_overflows(rule, learned):
    config = SymExpLin(12.5, rule)
    w = jnp.array([1e6, -1e6, 3e4, -3e4, 41 / 12.5, 0.0, -0.0, 1e-12, -1e-38, 3.0])[:, None]
    scales = {name: (jnp.full((10, 1), float(name != "n")), jnp.ones((1, 1))) for name in learned}
    for x in jax.tree.leaves(compiled(config)(w, scales, jnp.ones(w.shape))):
        assert jnp.isfinite(x).all()


def test_the_slope_stays_beyond_the_saturation():
    config = SymExpLin(2.0)
    edge = SATURATION / 2
    _, slopes, _ = compiled(config)(jnp.array([edge * 1.001, edge * 2, 1e5]), {}, jnp.ones(3))
    np.testing.assert_allclose(slopes, np.exp(SATURATION), rtol=1e-6)
    assert np.float64(slopes[0]) ** 2 < np.finfo(np.float32).max  # Adam squares it


# ---------------------------------------------------------------------------- scales of rank one


@rules
@pytest.mark.parametrize("beta", [0.5, 2.0, 12.5])
@some
@given(matrices, factors, vectors(SHAPE, -2, 2))
def test_factors(rule, beta, exponent, scales, cotangent):
    w = np.float32(exponent / beta)
    values = {name: oracle.product(pair) for name, pair in scales.items()}
    weights, by_weight, by_factor = compiled(SymExpLin(beta, rule))(w, scales, cotangent)
    # k is a product of three rounded numbers here: twice the rounding errors.
    allowed = tolerance(beta * values["m"] * np.abs(np.float64(w)), share=4.0)
    size = sum(map(np.abs, oracle.paths(w, beta, **values)))
    assert_near(weights, oracle.effective(w, beta, rule, **values), allowed * size)
    slope, steepest = oracle.by_weight(w, beta, rule, **values)
    assert_near(by_weight, cotangent * slope, allowed * np.abs(cotangent) * steepest + 1e-37)
    for (name, i), (expected, summands) in oracle.by_factor(cotangent, w, beta, rule, scales).items():
        assert by_factor[name][i].shape == scales[name][i].shape
        assert_near(by_factor[name][i], expected, allowed.max() * summands + 1e-37)


@rules
def test_a_vectors_scale(rule):
    """One factor, of length 1."""
    rng = np.random.default_rng(1)
    w, cotangent = rng.normal(size=(2, 3, 5)).astype(np.float32)
    scales = {name: (rng.uniform(0.5, 1.5, (3, 1)).astype(np.float32),) for name in SCALES}
    weights, _, found = compiled(SymExpLin(4.0, rule))(w, scales, cotangent)
    values = {name: oracle.product(pair) for name, pair in scales.items()}
    np.testing.assert_allclose(weights, oracle.effective(w, 4.0, rule, **values), rtol=1e-5)
    for (name, i), (expected, size) in oracle.by_factor(cotangent, w, 4.0, rule, scales).items():
        assert_near(found[name][i], expected, 2e-6 * size)


def test_constants_are_arrays_of_them():
    w = jnp.linspace(-2, 2, 20).reshape(SHAPE)
    constants = {"e": 0.7, "l": 1.3, "m": 0.9, "n": 0.2}
    scales = {name: (jnp.full((4, 1), value), jnp.ones((1, 5))) for name, value in constants.items()}
    expected = SymExpLin(3.0, **constants)(w)
    np.testing.assert_allclose(SymExpLin(3.0)(w, scales), expected, rtol=1e-6)
    some_of_them = {name: scales[name] for name in ("e", "n")}
    np.testing.assert_allclose(SymExpLin(3.0, l=1.3, m=0.9)(w, some_of_them), expected, rtol=1e-6)


def test_derivatives_have_their_arguments_types():
    w = jnp.linspace(-2, 2, 20, dtype=jnp.bfloat16).reshape(SHAPE)
    scales = {name: (jnp.ones((4, 1), jnp.bfloat16), jnp.ones((1, 5), jnp.float16)) for name in SCALES}
    weights, *gradients = compiled(SymExpLin(3.0))(w, scales, jnp.ones(SHAPE))
    assert weights.dtype == jnp.float32
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(gradients), (w, scales))


# ---------------------------------------------------------------------------- at zero


@rules
def test_the_slope_at_zero(rule):
    constants = {"e": 0.7, "l": 1.3, "m": 0.9, "n": 0.2}
    config = SymExpLin(3.0, rule, **constants)
    expected = 0.7 * 0.9 * np.exp(-0.2) + (1.3 / 3 if rule == "congruent" else 0)
    _, slopes, _ = compiled(config)(jnp.array([0.0, -0.0]), {}, jnp.ones(2))
    np.testing.assert_allclose(slopes, expected, rtol=1e-6)
    left, right = oracle.by_weight(np.array([-1e-12, 1e-12]), 3.0, rule, **constants)[0]
    np.testing.assert_allclose(expected, (left + right) / 2, rtol=1e-6)


@jax.jit
def sgd_step(node, target):
    gradient = jax.grad(lambda node: jnp.sum((node.effective() - target) ** 2))(node)
    return optax.apply_updates(node, jax.tree.map(lambda g: -0.05 * g, gradient))


@rules
@pytest.mark.parametrize("target", [0.3, -0.3])
def test_a_zero_bias_trains(rule, target):
    node = reparametrize({"bias": jnp.zeros(3)}, "bias", beta=2.0, rule=rule)["bias"]
    np.testing.assert_array_equal(node.effective(), 0.0)

    for _ in range(60):
        node = sgd_step(node, target)
    np.testing.assert_allclose(node.effective(), target, atol=1e-2)


# ---------------------------------------------------------------------------- transformations, errors


@rules
def test_vmap(rule):
    rng = np.random.default_rng(2)
    w = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    scales = {
        name: tuple(rng.uniform(0.5, 1.5, (3, *shape)).astype(np.float32) for shape in ((4, 1), (1, 5)))
        for name in SCALES
    }
    config = SymExpLin(2.0, rule)
    run = compiled(config)
    found = jax.vmap(run)(w, scales, jnp.ones(w.shape))
    whole = run(w, scales, jnp.ones(w.shape))
    alone = [run(*jax.tree.map(lambda x, i=i: x[i], (w, scales)), jnp.ones(SHAPE)) for i in range(3)]
    for expected in (whole, jax.tree.map(lambda *x: jnp.stack(x), *alone)):
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_exponential_is_not_kept_for_the_backward_pass():
    w = jnp.ones((64, 64))
    scales = {name: (jnp.ones((64, 1)), jnp.ones((1, 64))) for name in SCALES}
    _, pullback = jax.vjp(SymExpLin(2.0), w, scales)
    assert sum(x.size for x in jax.tree.leaves(pullback)) <= w.size + 8 * 64


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wrong_beta_is_refused(beta):
    with pytest.raises(ValueError, match="beta must be positive and finite"):
        SymExpLin(beta)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown rule 'odd': choose one of mismatch, congruent"):
        SymExpLin(1.0, "odd")
    with pytest.raises(ValueError, match="unknown scales 'z': choose among e, l, m, n"):
        SymExpLin(1.0)(jnp.ones(3), {"z": (jnp.ones(1),)})
