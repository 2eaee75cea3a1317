"""Folding and back, labels and masks for optax, and params of Linen, NNX and dataclasses."""

from dataclasses import dataclass
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sel_jax import SCALES, SelWeight, decay_mask, effective, fold, labels, reparametrize, unfold

BETA = 4.0
weights_of = jax.jit(effective)


def draw(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    kernel, bias, gain = (np.float32(rng.normal(size=shape) / 4) for shape in ((8, 6), 6, 6))
    return {"dense": {"bias": bias, "kernel": jnp.asarray(kernel, jnp.bfloat16)}, "gain": gain, "none": None}


PARAMS = draw()


def moved(nodes, seed: int = 1):
    """As after some training: nothing is at its start."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x) + np.float32(rng.normal(size=x.shape) / 20), nodes)


@pytest.fixture(scope="module", params=["exact", "anchored"])
def nodes(request):
    kernel = reparametrize(
        {"kernel": PARAMS["dense"]["kernel"]},
        "*",
        beta=BETA,
        start=request.param,
        rank=2,
        key=jax.random.key(0),
    )
    bias = reparametrize({"bias": PARAMS["dense"]["bias"]}, "*", beta=BETA, start=request.param)
    return {**PARAMS, "dense": bias | kernel}


# ---------------------------------------------------------------------------- fold and unfold


def test_effective_leaves_other_trees_alone():
    tree = {"a": PARAMS, "b": (optax.MaskedNode(), [1, 2.0, None, "text"]), "c": optax.EmptyState()}
    found = effective(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (found, tree)), strict=True))


def test_fold(nodes):
    folded = fold(moved(nodes))
    assert jax.tree.structure(folded) == jax.tree.structure(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(folded, PARAMS)
    chex.assert_trees_all_equal(folded, weights_of(moved(nodes)))
    assert np.abs(folded["dense"]["bias"] - PARAMS["dense"]["bias"]).max() > 1e-2


def test_fold_includes_the_residual():
    params = {"k": np.zeros((4, 3), np.float32)}
    node = reparametrize(params, "k", beta=BETA, rank=1, key=jax.random.key(0))["k"]
    b = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    node = SelWeight(**{**vars(node), "residual": {**node.residual, "b": b}})
    np.testing.assert_allclose(fold({"k": node})["k"], b @ np.asarray(node.residual["a"]), rtol=1e-6)


def test_unfold_is_folds_inverse(nodes):
    trained = jax.tree.map(lambda x: x, moved(nodes))
    # In float32, not to lose digits of the bfloat16 kernel.
    kernel = SelWeight(**{**vars(trained["dense"]["kernel"]), "dtype": "float32"})
    trained["dense"]["kernel"] = kernel
    found = jax.jit(unfold)(fold(trained), trained)
    assert jax.tree.structure(found) == jax.tree.structure(trained)
    chex.assert_trees_all_close(found, trained, rtol=1e-5, atol=1e-6)


def test_unfold_of_other_weights(nodes):
    """An average of weights, say, or those of another run: the function is theirs."""
    weights = draw(2)
    found = jax.jit(unfold)(weights, moved(nodes))
    for name in ("scales", "residual", "anchor"):
        chex.assert_trees_all_equal(
            *(jax.tree.map(np.asarray, getattr(x["dense"]["kernel"], name)) for x in (found, moved(nodes)))
        )
    assert found["gain"] is not None
    chex.assert_trees_all_close(weights_of(found), weights, rtol=1e-2, atol=1e-6)  # bfloat16's
    np.testing.assert_allclose(
        weights_of(found)["dense"]["bias"], weights["dense"]["bias"], rtol=1e-5, atol=1e-6
    )


def test_what_unfold_refuses(nodes):
    wrong = {**PARAMS, "dense": {**PARAMS["dense"], "kernel": np.zeros((8, 7), np.float32)}}
    with pytest.raises(ValueError, match=r"dense/kernel, of shape \(8, 7\): .* does not fit .*\(8, 6\)"):
        unfold(wrong, nodes)
    bias = nodes["dense"]["bias"]
    pushed = SelWeight(**{**vars(bias), "scales": {**bias.scales, "l": (jnp.full(1, 5.0),)}})
    like = {**nodes, "dense": {**nodes["dense"], "bias": pushed}}
    with pytest.raises(ValueError, match=r"dense/bias, of shape \(6,\): .*is not invertible"):
        unfold(PARAMS, like)


# ---------------------------------------------------------------------------- labels and masks


def test_labels(nodes):
    found = labels(nodes)
    assert jax.tree.structure(found) == jax.tree.structure(nodes)
    kernel, bias = found["dense"]["kernel"], found["dense"]["bias"]
    assert kernel.raw == bias.raw == "raw" and found["gain"] == "other"
    assert kernel.scales == {name: (name, name) for name in SCALES}
    assert bias.scales == {name: (name,) for name in SCALES}
    assert kernel.residual == {"b": "residual", "a": "residual"}
    if bias.anchor is not None:
        assert bias.anchor == {"weight": "anchor", "raw": "anchor"}


def test_labels_of_gradients_and_states(nodes):
    gradient = jax.tree.map(np.zeros_like, nodes)
    assert labels(gradient) == labels(nodes)
    state = optax.adam(1e-3).init(nodes)
    found = labels(state)
    assert found[0].mu == found[0].nu == labels(nodes) and found[0].count == "other"
    masked = optax.masked(optax.adam(1e-3), decay_mask).init(nodes).inner_state[0].mu
    assert labels(masked)["dense"]["bias"].raw == "raw"
    assert isinstance(labels(masked)["dense"]["bias"].scales["e"][0], optax.MaskedNode)


def test_decay(nodes):
    """With gradients of zero, what moves is what decays."""
    trained = moved(nodes)
    for optimizer in (
        optax.adamw(0.1, weight_decay=0.5, mask=decay_mask),
        optax.adamw(0.1, weight_decay=0.5, mask=decay_mask(nodes)),
    ):
        updates, _ = optimizer.update(jax.tree.map(np.zeros_like, trained), optimizer.init(trained), trained)

        def check(label, update, x):
            expected = 0 if label in (*SCALES, "anchor") else -0.05
            np.testing.assert_allclose(update, expected * x, rtol=1e-5)

        jax.tree.map(check, labels(trained), updates, trained)
    assert {label for label in jax.tree.leaves(labels(nodes))} >= {"raw", "residual", "other", *SCALES}


def test_partition(nodes):
    """Each kind with its own optimiser, by the function and by its result."""
    rates = {"raw": 1.0, "residual": 2.0, "anchor": 0.0, "other": 3.0, "e": 4.0, "l": 5.0, "m": 6.0, "n": 7.0}
    parts = {name: optax.sgd(rate) for name, rate in rates.items()}
    ones = jax.tree.map(np.ones_like, nodes)
    for by in (labels, labels(nodes)):
        optimizer = optax.partition(parts, by)
        updates, _ = optimizer.update(ones, optimizer.init(nodes), nodes)
        jax.tree.map(
            lambda label, x: np.testing.assert_array_equal(np.float32(x), -rates[label]),
            labels(nodes),
            updates,
        )


# ---------------------------------------------------------------------------- frameworks


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(6, name="first")(x))
        return nn.DenseGeneral((2, 3), name="heads")(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs, use_running_average=True)
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](self.norm(nnx.relu(self.first(x))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Linear:
    weight: Any
    bias: Any

    def __call__(self, x):
        return x @ self.weight + self.bias


X = np.float32(np.random.default_rng(5).normal(size=(3, 4)))


def trained_a_step(nodes, loss):
    return jax.tree.map(lambda x, g: x - 0.01 * g, nodes, jax.grad(loss)(nodes))


def test_linen():
    model = LinenModel()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    nodes = reparametrize(params, "*/kernel", beta=BETA, start="exact")

    @jax.jit
    def apply(params):
        return model.apply({"params": effective(params)}, X)

    np.testing.assert_allclose(apply(nodes), apply(params), rtol=1e-5, atol=1e-6)
    stepped = jax.jit(trained_a_step, static_argnums=1)(nodes, lambda x: jnp.sum(apply(x) ** 2))
    np.testing.assert_allclose(apply(fold(stepped)), apply(stepped), rtol=1e-6)
    assert np.abs(apply(stepped) - apply(nodes)).max() > 1e-2


def test_nnx():
    model = NnxModel(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    nodes = reparametrize(params, ["*kernel", "first/bias"], beta=BETA, start="exact")
    assert isinstance(nodes["layers"][0]["kernel"].get_value(), SelWeight)
    assert isinstance(nodes["first"]["bias"].get_value(), SelWeight)

    @jax.jit
    def apply(params):
        return nnx.merge(graph, effective(params), rest)(X)

    before = apply(params)
    np.testing.assert_allclose(apply(nodes), before, rtol=1e-5, atol=1e-6)
    nnx.update(model, fold(nodes))
    np.testing.assert_allclose(model(X), before, rtol=1e-5, atol=1e-6)
    stepped = jax.jit(trained_a_step, static_argnums=1)(nodes, lambda x: jnp.sum(apply(x) ** 2))
    assert np.abs(apply(stepped) - before).max() > 1e-2
    chex.assert_trees_all_equal_shapes_and_dtypes(fold(stepped), params)
    with pytest.raises(ValueError, match=r"^first/bias, of shape \(1,\): "):
        unfold(jax.tree.map(lambda x: np.asarray(x)[:1], params), nodes)


def test_a_dataclass():
    rng = np.random.default_rng(6)
    layers = [Linear(*(np.float32(rng.normal(size=shape)) for shape in ((4, 4), 4))) for _ in range(2)]
    nodes = reparametrize(layers, ["*/weight", "0/bias"], beta=BETA, start="exact")
    assert isinstance(nodes[0].bias, SelWeight) and nodes[1].bias is layers[1].bias

    @jax.jit
    def apply(layers):
        first, second = effective(layers)
        return second(jnp.tanh(first(X)))

    np.testing.assert_allclose(apply(nodes), apply(layers), rtol=1e-5, atol=1e-6)
    assert isinstance(fold(nodes)[0], Linear)
