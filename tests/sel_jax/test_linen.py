"""The Linen wrapper: the plain model's tree with nodes in it, under Flax's transformations and optax."""

import inspect
import subprocess
import sys
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers

import sel_jax
from sel_jax.linen import Reparametrized

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 8))
# A layer, where its weights are, and an input.
LAYERS = {
    "dense": (partial(nn.Dense, 6), "kernel", X),
    "general": (partial(nn.DenseGeneral, (2, 3)), {"kernel": MuonDimensionNumbers((0,), (1, 2))}, X),
    "conv": (partial(nn.Conv, 6, (3,)), "*kernel", X[None]),
    "embed": (partial(nn.Embed, 10, 6), "embedding", jnp.arange(4)),
}


class Block(nn.Module):
    """Two layers, a bias each, and a LayerNorm between them; wrapped one by one if options are given."""

    options: dict | None = None

    @nn.compact
    def __call__(self, x, _=None):
        x = self._wrap(nn.Dense(8))(x)
        x = nn.gelu(nn.LayerNorm()(x))
        return self._wrap(nn.Dense(8))(x), None

    def _wrap(self, layer):
        return layer if self.options is None else Reparametrized(layer, **self.options)


class Around(nn.Module):
    """Gives the layer the same name, and so the same weights, with the wrapper and without."""

    layer: partial
    options: dict | None = None

    @nn.compact
    def __call__(self, x):
        layer = self.layer()
        return (layer if self.options is None else Reparametrized(layer, **self.options))(x)


def stacked(options=None):
    block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return block(options)


def assert_same(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), actual, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_its_outputs(name):
    layer, where, x = LAYERS[name]
    wrapped = Around(layer, {"where": where, "start": "exact"})

    @jax.jit
    def outputs():
        plain, variables = Around(layer).init(KEY, x), wrapped.init(KEY, x)
        folded = sel_jax.fold(variables)
        return (Around(layer).apply(plain, x), plain), (wrapped.apply(variables, x), folded)

    (expected, plain), (output, folded) = outputs()
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)
    assert_same(folded, plain, rtol=0, atol=1e-5)


def test_an_anchored_layer_keeps_them_to_the_bit():
    expected, plain = Around(partial(nn.Dense, 6)).init_with_output(KEY, X)
    wrapped = Around(partial(nn.Dense, 6), {"where": "kernel", "start": "anchored"})
    output, variables = wrapped.init_with_output(KEY, X)
    assert_same((output, sel_jax.fold(variables)), (expected, plain), rtol=0)


@pytest.mark.parametrize(
    "model, start", [(Block, "mismatched"), (stacked, "anchored")], ids=["block", "scan_remat"]
)
def test_the_tree_is_that_of_reparametrize(model, start):
    wrapped = model({"where": "kernel", "start": start})

    @jax.jit
    def trees():
        plain, variables = model().init(KEY, X), wrapped.init(KEY, X)
        expected = sel_jax.reparametrize(plain, "*kernel", start=start)
        folded = model().apply(sel_jax.fold(variables), X)
        return (variables, wrapped.apply(variables, X)), (expected, folded)

    assert_same(*trees(), rtol=1e-6, atol=1e-6)


def test_a_whole_model_in_one_wrapper_is_the_same_as_its_layers_in_one_each():
    @jax.jit
    def trees():
        whole = Around(Block, {"where": "*kernel"}).init(KEY, X)
        return whole, sel_jax.reparametrize(Around(Block).init(KEY, X), "*kernel")

    assert_same(*trees(), rtol=1e-6, atol=1e-6)


def test_training_moves_scales_and_zero_biases_under_scan_and_remat():
    model = stacked({"where": ["kernel", "bias"], "learn": ("e", "m")})
    variables = jax.jit(model.init)(KEY, X)
    transform = optax.chain(
        optax.adamw(1e-2, mask=sel_jax.decay_mask), sel_jax.scale_rates(sel_jax.annealed(5))
    )

    @jax.jit
    def step(variables, state):
        def loss(variables):
            return jnp.mean((model.apply(variables, X)[0] - 1) ** 2)

        value, gradients = jax.value_and_grad(loss)(variables)
        updates, state = transform.update(gradients, state, variables)
        return value, optax.apply_updates(variables, updates), state

    state, trained, losses = transform.init(variables), variables, []
    for _ in range(5):
        value, trained, state = step(trained, state)
        losses.append(value)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    for name in ("kernel", "bias"):
        before, after = (tree["params"]["Dense_1"][name] for tree in (variables, trained))
        assert np.all(after.raw != before.raw)
        moved = jax.tree.map(lambda b, a: np.all(a != b), before.scales, after.scales)
        assert jax.tree.all(moved), moved
    assert np.any(sel_jax.fold(trained)["params"]["Dense_1"]["bias"])


def test_a_residual_takes_its_key_from_the_params_stream():
    init = jax.jit(Block({"where": "kernel", "rank": 2}).init)
    params, again, other = (init(key, X)["params"] for key in (KEY, KEY, jax.random.key(5)))
    residual = params["Dense_0"]["kernel"].residual
    assert residual["a"].shape == (2, 8) and residual["b"].shape == (8, 2)
    assert_same(again, params)
    for tree in (params["Dense_1"], other["Dense_0"]):
        assert np.all(tree["kernel"].residual["a"] != residual["a"])


def test_every_option_is_handed_on():
    options = {"beta": 3.0, "rule": "congruent", "learn": ["e"], "values": {"m": 0.5}, "start": "exact"}
    init = Reparametrized(nn.Dense(8), "kernel", **options).init
    node = jax.eval_shape(init, KEY, X)["params"]["layer"]["kernel"]
    assert node.config == sel_jax.SymExpLin(3.0, "congruent", m=0.5) and list(node.scales) == ["e"]

    fields = dict(inspect.signature(Reparametrized).parameters)
    for name, parameter in inspect.signature(sel_jax.reparametrize).parameters.items():
        if name not in ("params", "key"):
            assert fields[name].default == parameter.default


@pytest.mark.parametrize(
    "transform, shape",
    [
        (nn.jit, (8, 8)),
        (partial(nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}), (4, 8, 8)),
    ],
    ids=["jit", "vmap"],
)
def test_lifted_wrappers(transform, shape):
    wrapped, plain = transform(Reparametrized)(nn.Dense(8), "kernel"), transform(Around)(partial(nn.Dense, 8))

    @jax.jit
    def outputs():
        variables = flax.core.freeze(wrapped.init(KEY, X))
        params = sel_jax.fold(variables)["params"]["layer"]
        return params, wrapped.apply(variables, X), plain.apply({"params": {"Dense_0": params}}, X)

    params, output, folded = outputs()
    assert params["kernel"].shape == shape
    np.testing.assert_allclose(output, folded, atol=1e-6)


def test_other_collections_and_streams_pass_through():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
            self.sow("intermediates", "x", x)
            return nn.Dropout(0.5, deterministic=False)(x)

    rngs, apply = {"params": KEY, "dropout": KEY}, {"mutable": ["batch_stats", "intermediates"]}
    model = Around(Noisy, {"where": "*kernel"})

    @jax.jit
    def outputs():
        variables = model.init(rngs, X)
        folded = {**variables, "params": sel_jax.fold(variables["params"])}
        return [m.apply(v, X, rngs=rngs, **apply) for m, v in ((model, variables), (Around(Noisy), folded))]

    (output, changed), expected = outputs()
    assert set(changed) == {"batch_stats", "intermediates"}
    assert_same((output, changed), expected, atol=1e-6)


def test_a_wrapper_run_twice_shares_its_weights():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = Reparametrized(nn.Dense(8), "kernel")
            return layer(layer(x))

    output, variables = Twice().init_with_output(KEY, X)
    dense = sel_jax.fold(variables)["params"]["Dense_0"]
    np.testing.assert_allclose(X @ dense["kernel"] @ dense["kernel"], output, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"where": "*weight"}, "'\\*weight' matches no parameter; the parameters are: bias, kernel"),
        ({"where": "*", "rank": 1}, "is a vector"),
        ({"where": "*", "start": "warm"}, "unknown start 'warm'"),
    ],
)
def test_what_reparametrize_refuses_is_refused_at_init(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(Reparametrized(nn.Dense(8), **options).init, KEY, X)


def test_orbax_restores_nodes(tmp_path):
    init = Block({"where": "kernel", "start": "anchored", "rank": 1}).init
    variables = jax.jit(init)(KEY, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(init, KEY, X))
    assert_same(restored, variables)


def test_the_core_does_not_need_flax():
    subprocess.run(
        [sys.executable, "-c", "import sys, sel_jax; assert 'flax' not in sys.modules"], check=True
    )
