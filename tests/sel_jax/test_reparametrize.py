"""Trees into curved weight space: starts, stacks, dimension numbers, and the residual."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from sel_jax import SelWeight, beta_for, default_beta, effective, reparametrize
from tests.sel_jax import map_oracle as oracle

# Jitted once: eager operations on small arrays are compiled one by one.
weights_of = jax.jit(effective)
BETA = 4.0


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.float32(np.random.default_rng(seed).normal(size=shape) / 4))


def loss(params) -> jax.Array:
    return sum(jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(effective(params)))


gradient_of = jax.jit(jax.grad(loss))


def moved(params, seed: int = 0):
    """Everything but anchors a little away from its start, as after some training."""
    rng = np.random.default_rng(seed)

    def move(node: SelWeight) -> SelWeight:
        kept = node.anchor
        away = jax.tree.map(lambda x: np.asarray(x) + np.float32(rng.normal(size=x.shape) / 20), node)
        return SelWeight(**{**vars(away), "anchor": kept})

    return jax.tree.map(move, params, is_leaf=lambda x: isinstance(x, SelWeight))


# ---------------------------------------------------------------------------- structure


def test_what_a_node_holds():
    params = {"h": {"kernel": random(0, 3, 4, 5), "bias": random(1, 5)}, "gain": random(2, 5)}
    found = reparametrize(params, "h/*", beta=BETA)
    assert found["gain"] is params["gain"]
    kernel, bias = found["h"]["kernel"], found["h"]["bias"]
    assert [x.shape for x in kernel.scales["e"]] == [(3, 4, 1), (3, 1, 5)]
    assert [x.shape for x in bias.scales["m"]] == [(1,)]
    for node in (kernel, bias):
        assert node.residual is None and node.anchor is None
        assert list(node.scales) == ["e", "l", "m", "n"]
        for name, (first, *others) in node.scales.items():
            np.testing.assert_array_equal(first, float(name != "n"))
            for other in others:
                np.testing.assert_array_equal(other, 1.0)


def test_every_factor_gets_a_gradient():
    """An offset that starts at zero too: one of its factors is 0 and the other 1."""
    node = gradient_of(reparametrize({"k": random(0, 4, 5)}, "k", beta=BETA))["k"]
    for name, (first, second) in node.scales.items():
        assert np.abs(first).min() > 0
        assert (np.abs(second).min() > 0) == (name != "n")


def test_beta_follows_the_width():
    assert default_beta(100) == pytest.approx(10.0)
    assert default_beta(2) == 1.5
    assert beta_for(0.02, curvature=0.4) == pytest.approx(20.0)
    assert beta_for(0.02, curvature=0.01) == 1.5
    params = {"k": random(0, 3, 16, 5), "v": random(1, 3, 9), "s": jnp.float32(0.5)}
    found = reparametrize(params, {"k": MuonDimensionNumbers(1, 2), "*": None}, beta=float)
    assert [found[name].config.beta for name in "kvs"] == [16.0, 9.0, 1.0]
    found = reparametrize(params, "k")
    np.testing.assert_allclose(found["k"].config.beta, default_beta(16))


def test_a_scalar():
    params = {"s": jnp.float32(-0.5)}
    for start in ("exact", "anchored"):
        found = reparametrize(params, "s", beta=BETA, start=start)
        np.testing.assert_allclose(weights_of(found)["s"], -0.5, rtol=1e-6)
        chex.assert_trees_all_equal_shapes_and_dtypes(gradient_of(found), found)


def test_constants_and_values():
    found = reparametrize({"k": random(0, 4, 5)}, "k", beta=BETA, learn="em", values={"e": 0.5, "l": 0.25})
    node = found["k"]
    assert list(node.scales) == ["e", "m"] and node.config.l == 0.25
    np.testing.assert_array_equal(node.scales["e"][0], 0.5)
    none = reparametrize({"k": random(0, 4, 5)}, "k", beta=BETA, learn=())["k"]
    assert none.scales == {} and len(jax.tree.leaves(none)) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes(dtype):
    params = {"k": random(0, 4, 5).astype(dtype)}
    found = reparametrize(params, "k", beta=BETA, start="exact", rank=2, key=jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal_shapes_and_dtypes(weights_of(found), params)
    np.testing.assert_allclose(weights_of(found)["k"], params["k"], rtol=2e-6)


# ---------------------------------------------------------------------------- starts


@pytest.mark.parametrize("rule", ["mismatch", "congruent"])
def test_exact_start(rule):
    params = {"k": random(0, 4, 5), "b": jnp.zeros(5)}
    found = weights_of(reparametrize(params, "*", beta=BETA, rule=rule, start="exact"))
    chex.assert_trees_all_close(found, params, rtol=2e-6)


def test_mismatched_start():
    params = {"k": random(0, 4, 5)}
    found = reparametrize(params, "k", beta=BETA)
    w = params["k"]
    raw = oracle.inverse(w, BETA, "congruent")
    np.testing.assert_allclose(found["k"].raw, raw, rtol=2e-6)
    np.testing.assert_allclose(weights_of(found)["k"], oracle.effective(raw, BETA), rtol=1e-5)
    congruent = reparametrize(params, "k", beta=BETA, rule="congruent")
    np.testing.assert_allclose(weights_of(congruent)["k"], w, rtol=2e-6)


# ---------------------------------------------------------------------------- stacks and axes


def stacked_and_single(start: str):
    stack = {"k": random(3, 3, 4, 5), "b": random(4, 3, 5)}
    where = {"k": MuonDimensionNumbers(-2, -1), "b": None}
    convert = partial(reparametrize, where=where, beta=BETA, start=start)
    return convert, stack, [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(3)]


@pytest.mark.parametrize("start", ["mismatched", "anchored"])
def test_a_stack_is_its_matrices(start):
    """At once, one by one, and vmapped: the same nodes, weights and gradients."""
    convert, stack, single = stacked_and_single(start)
    whole = convert(stack)
    alone = jax.tree.map(lambda *x: jnp.stack(x), *map(convert, single))
    chex.assert_trees_all_close(whole, alone, rtol=1e-6)
    mapped = jax.jit(jax.vmap(convert))(stack)
    chex.assert_trees_all_close(mapped, whole, rtol=1e-6)
    whole = moved(whole)
    chex.assert_trees_all_close(jax.jit(jax.vmap(effective))(whole), weights_of(whole), rtol=1e-5)
    chex.assert_trees_all_close(jax.vmap(gradient_of)(whole), gradient_of(whole), rtol=1e-4, atol=1e-5)


def test_a_scan_over_layers():
    convert, stack, _ = stacked_and_single("mismatched")
    whole = moved(convert(stack))

    @jax.jit
    def outputs(nodes):
        return jax.lax.scan(lambda carry, node: (carry, effective(node)), 0, nodes)[1]

    chex.assert_trees_all_close(outputs(whole), weights_of(whole), rtol=1e-5)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda carry, w: (carry, convert(w)), 0, x)[1])(stack)
    chex.assert_trees_all_close(scanned, convert(stack), rtol=1e-6)


AXES = {
    "heads out": ((6, 2, 3), MuonDimensionNumbers(0, (1, 2)), (6, 1, 1), (1, 2, 3), (6, 6), ()),
    "heads in": ((2, 3, 6), MuonDimensionNumbers((0, 1), 2), (2, 3, 1), (1, 1, 6), (6, 6), ()),
    "per head": ((6, 2, 3), MuonDimensionNumbers(0, 2), (6, 2, 1), (1, 2, 3), (6, 3), (2,)),
    "conv": ((3, 3, 2, 4), MuonDimensionNumbers((0, 1, 2), 3), (3, 3, 2, 1), (1, 1, 1, 4), (18, 4), ()),
    "transposed": ((4, 6), MuonDimensionNumbers(-1, -2), (1, 6), (4, 1), (6, 4), ()),
    "stack of heads": (
        (5, 6, 2, 3),
        MuonDimensionNumbers(-3, (-2, -1)),
        (5, 6, 1, 1),
        (5, 1, 2, 3),
        (6, 6),
        (5,),
    ),
}


@pytest.mark.parametrize("name", AXES)
def test_dimension_numbers(name):
    shape, numbers, inputs, outputs, (fan_in, fan_out), batch = AXES[name]
    params = {"k": random(5, *shape)}
    found = reparametrize(params, {"k": numbers}, beta=BETA, start="exact", rank=2, key=jax.random.key(0))
    node = found["k"]
    assert [x.shape for x in node.scales["l"]] == [inputs, outputs]
    assert node.residual["b"].shape == (*batch, fan_in, 2)
    assert node.residual["a"].shape == (*batch, 2, fan_out)
    np.testing.assert_allclose(weights_of(found)["k"], params["k"], rtol=2e-6)
    # A product of the two factors is a matrix of rank one: one input's factor scales that input's weights.
    first = np.ones(inputs, np.float32)
    first[(0,) * len(shape)] = 2.0
    changed = SelWeight(**{**vars(node), "scales": {**node.scales, "e": (first, node.scales["e"][1])}})
    touched = np.abs(np.asarray(weights_of({"k": changed})["k"]) - params["k"]) > 1e-4
    assert touched.sum() == fan_out


def test_a_stack_of_dense_general_kernels_under_vmap():
    """Axes are counted from the last, so that an axis in front does no harm."""
    numbers = {"k": MuonDimensionNumbers(0, (1, 2))}
    convert = partial(reparametrize, where=numbers, beta=BETA, rank=2, key=jax.random.key(0))
    stack = {"k": random(5, 5, 6, 2, 3)}
    node = moved(jax.jit(jax.vmap(convert))(stack))
    found, expected = (function(node) for function in (weights_of, jax.jit(jax.vmap(effective))))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------- the residual


def test_residual():
    params = {"k": random(6, 3, 8, 5)}
    plain = reparametrize(params, "k", beta=BETA)
    found = reparametrize(params, "k", beta=BETA, rank=2, key=jax.random.key(1))
    np.testing.assert_array_equal(weights_of(found)["k"], weights_of(plain)["k"])
    b, a = found["k"].residual["b"], found["k"].residual["a"]
    assert not b.any() and 0.6 < float(jnp.std(a)) * math.sqrt(8) < 1.4
    changed = moved(found)
    without = SelWeight(**{**vars(changed["k"]), "residual": None})
    b, a = (np.asarray(changed["k"].residual[name], np.float64) for name in "ba")
    np.testing.assert_allclose(weights_of(changed)["k"], weights_of(without) + b @ a, atol=1e-6)
    gradient = gradient_of(found)["k"].residual
    assert jnp.abs(gradient["b"]).min() > 0 and not gradient["a"].any()
    np.testing.assert_array_equal(np.abs(gradient_of(changed)["k"].residual["a"]) > 0, True)


def test_residuals_differ():
    params = {"k": random(6, 4, 4), "q": random(7, 4, 4)}
    found = reparametrize(params, "*", beta=BETA, rank=1, key=jax.random.key(1))
    assert np.abs(found["k"].residual["a"] - found["q"].residual["a"]).min() > 1e-4


def test_residual_trains():
    target = random(8, 4, 5) + 0.5
    node = reparametrize({"k": jnp.zeros((4, 5))}, "k", beta=BETA, learn=(), rank=2, key=jax.random.key(2))
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(carry, _):
        node, state = carry
        error, gradient = jax.value_and_grad(lambda x: jnp.mean((effective(x)["k"] - target) ** 2))(node)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(node, updates), state), error

    (trained, _), errors = jax.lax.scan(step, (node, optimizer.init(node)), length=100)
    assert errors[-1] < errors[0] / 20
    assert np.abs(trained["k"].residual["b"]).min() > 1e-3


# ---------------------------------------------------------------------------- transformations


@pytest.mark.parametrize("start", ["exact", "anchored"])
def test_abstract_and_jitted(start):
    params = {"k": random(0, 3, 4, 5), "b": random(1, 5)}

    def convert(params, key):
        nodes = reparametrize({"k": params["k"]}, "k", beta=BETA, start=start, rank=2, key=key)
        return {**nodes, "b": reparametrize(params["b"], "*", beta=BETA, start=start)}

    key = jax.random.key(0)
    found = convert(params, key)
    chex.assert_trees_all_close(jax.jit(convert)(params, key), found, rtol=1e-6)
    # A stack that no machine could allocate.
    huge = {"k": jax.ShapeDtypeStruct((10**6, 10**5, 10**5), jnp.bfloat16), "b": params["b"]}
    abstract = jax.eval_shape(convert, huge, key)
    assert abstract["k"].raw.shape == huge["k"].shape
    assert jax.eval_shape(effective, abstract)["k"] == huge["k"]
    assert jax.tree.structure(abstract["b"]) == jax.tree.structure(found["b"])
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(convert, params, key), found)
