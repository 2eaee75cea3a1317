"""Anchored starts: the weights themselves to the bit, until something moves, and with the same gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sel_jax import SCALES, effective, labels, reparametrize
from sel_jax.symexplin import RULES
from tests.sel_jax import map_oracle as oracle

BETA = 4.0
DTYPES = (jnp.float32, jnp.bfloat16)
weights_of = jax.jit(effective)


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(3, 8, 6)) * 10 ** rng.uniform(-6, 1, (3, 8, 6))
    return {"bias": jnp.zeros(6, dtype), "kernel": jnp.asarray(kernel, dtype)}


def anchored(params, **options):
    return reparametrize(params, "*", beta=BETA, start="anchored", **options)


def loss(params):
    return sum(jnp.sum(jnp.sin(2 * x.astype(jnp.float32))) for x in jax.tree.leaves(effective(params)))


def assert_bits(found, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_to_the_bit(dtype, rule):
    params = draw(dtype)
    nodes = anchored(params, rule=rule)
    assert_bits(weights_of(nodes), params)
    assert_bits(jax.jit(lambda x: effective(anchored(x, rule=rule)))(params), params)
    if dtype == jnp.bfloat16:
        assert_bits(effective(nodes), params)


def test_to_the_bit_with_other_constants_and_a_residual():
    params = {"kernel": draw()["kernel"]}
    nodes = anchored(params, values={"e": 1.1, "l": 0.7, "m": 0.9, "n": 0.1}, rank=2, key=jax.random.key(0))
    assert_bits(weights_of(nodes), params)


@pytest.mark.parametrize("jitted", [False, True])
def test_donation(jitted):
    """The tree's buffers are its own: it can be donated whole, and the ordinary weights live on."""
    params = draw()
    expected = jax.device_get(params)
    nodes = (jax.jit(anchored) if jitted else anchored)(params)
    still = jax.jit(lambda x: jax.tree.map(lambda y: 1 * y, x), donate_argnums=0)(nodes)
    assert_bits(weights_of(still), expected)
    assert_bits(params, expected)
    moved = jax.jit(anchored, donate_argnums=0)(params)
    assert_bits(weights_of(moved), expected)


def test_not_after_an_update():
    params = draw()
    nodes = anchored(params)
    step = jax.jit(lambda x: jax.tree.map(lambda y, g: y - 0.01 * g, x, jax.grad(loss)(x)))
    stepped = step(nodes)
    assert_bits(stepped["kernel"].anchor, nodes["kernel"].anchor)
    change = jax.tree.map(lambda x, y: np.abs(x - y), weights_of(stepped), params)
    assert change["kernel"].max() > 1e-3
    # One moved scale moves its weights by what the map says, and no others.
    kernel = nodes["kernel"]
    first, second = kernel.scales["e"]
    kernel.scales["e"] = (first.at[1, 2, 0].set(1.5), second)
    found = weights_of({"kernel": kernel})["kernel"]
    e = np.ones((3, 8, 6))
    e[1, 2] = 1.5
    raw = kernel.raw
    by_oracle = params["kernel"] + oracle.effective(raw, BETA, e=e) - oracle.effective(raw, BETA)
    np.testing.assert_allclose(found, by_oracle, rtol=1e-5, atol=1e-7)
    touched = found != params["kernel"]
    assert touched[1, 2].all() and touched.sum() == 6


@pytest.mark.parametrize("rule", RULES)
def test_gradients(rule):
    """Those of W0 + f(u) - f0(u0): at the start, the exact start's."""
    params = draw()
    nodes, exact = (
        anchored(params, rule=rule),
        reparametrize(params, "*", beta=BETA, rule=rule, start="exact"),
    )
    gradient, expected = (jax.jit(jax.grad(loss))(x) for x in (nodes, exact))
    for name in params:
        assert all(not x.any() for x in gradient[name].anchor.values())
        chex.assert_trees_all_close(gradient[name].raw, expected[name].raw, rtol=1e-5, atol=2e-5)
        chex.assert_trees_all_close(gradient[name].scales, expected[name].scales, rtol=1e-4, atol=1e-4)
    changed = jax.tree.map(
        lambda label, x: x + 0.01 if label in ("raw", *SCALES) else x, labels(nodes), nodes
    )
    gradient = jax.jit(jax.grad(loss))(changed)["kernel"]
    values = {name: oracle.product(pair) for name, pair in changed["kernel"].scales.items()}
    weight = np.asarray(weights_of(changed)["kernel"], np.float64)
    slope, size = oracle.by_weight(changed["kernel"].raw, BETA, rule, **values)
    allowed = 1e-5 * size * (1 + np.abs(weight))
    assert (np.abs(gradient.raw - 2 * np.cos(2 * weight) * slope) <= allowed).all()


def test_an_anchor_stays_through_adamw():
    nodes = anchored(draw())
    optimizer = optax.adamw(1e-2, weight_decay=0.0)

    @jax.jit
    def step(nodes, state):
        updates, state = optimizer.update(jax.grad(loss)(nodes), state, nodes)
        return optax.apply_updates(nodes, updates), state

    found, state = nodes, optimizer.init(nodes)
    for _ in range(3):
        found, state = step(found, state)
    for name, node in nodes.items():
        assert_bits(found[name].anchor, node.anchor)
        assert np.abs(found[name].raw - node.raw).max() > 1e-2
