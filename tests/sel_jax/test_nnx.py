"""The NNX wrapper: outputs kept, one Param an array, under NNX's transformations and its Optimizer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import sel_jax
from sel_jax.nnx import Anchor, Reparametrized, fold

X = jax.random.normal(jax.random.key(1), (4, 8))
# A layer, where its weights are, and an input.
LAYERS = {
    "linear": (partial(nnx.Linear, 8, 6), "kernel", X),
    "general": (partial(nnx.LinearGeneral, 8, (2, 3)), {"kernel": MuonDimensionNumbers((0,), (1, 2))}, X),
    "conv": (partial(nnx.Conv, 8, 6, (3,)), "*kernel", X[None]),
    "embed": (partial(nnx.Embed, 10, 6), "embedding", jnp.arange(4)),
}


class Block(nnx.Module):
    """Layers of all kinds: in a list, with statistics, with a random stream."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x):
        x = nnx.gelu(self.norm(self.first(x)))
        for layer in self.rest:
            x = layer(x)
        return x


class Pair(nnx.Module):
    """Two wrapped layers around a plain one."""

    def __init__(self, rngs, rank=0, **options):
        wrap = partial(Reparametrized, rngs=rngs, **options)
        self.first = wrap(nnx.Linear(8, 8, rngs=rngs), "kernel", rank=rank)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = wrap(nnx.Linear(8, 8, rngs=rngs), ["kernel", "bias"])

    def __call__(self, x):
        return self.last(nnx.gelu(self.norm(self.first(x))))


def assert_same(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), actual, expected)


def arrays(module, kind=nnx.Param):
    return nnx.as_pure(nnx.state(module, kind))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_its_outputs(name):
    layer, where, x = LAYERS[name]

    @jax.jit
    def outputs():
        plain = layer(rngs=nnx.Rngs(0))
        wrapped = Reparametrized(plain, where, start="exact")
        folded = fold(wrapped)
        return (wrapped(x), folded(x), arrays(folded)), (plain(x), plain(x), arrays(plain))

    assert_same(*outputs(), rtol=0, atol=1e-5)


def test_an_anchored_layer_keeps_them_to_the_bit():
    plain = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    wrapped = Reparametrized(plain, "kernel", start="anchored")
    np.testing.assert_array_equal(wrapped(X), plain(X))
    assert_same(arrays(fold(wrapped)), arrays(plain), rtol=0)
    # What is added to gets no gradient, and no optimiser's step.
    assert set(arrays(wrapped)["layer"]["kernel"]) == {"raw", "scales"}
    assert set(arrays(wrapped, Anchor)["layer"]["kernel"]["anchor"]) == {"weight", "raw"}


def test_the_arrays_are_those_of_reparametrize_and_the_layer_passed_stays():
    plain = Block(nnx.Rngs(0))
    before, rngs = arrays(plain), nnx.Rngs(1)
    options = {"where": "*kernel", "rank": 2, "learn": ("e",)}
    wrapped = Reparametrized(plain, rngs=rngs, **options)
    expected = sel_jax.reparametrize(before, key=nnx.Rngs(1).params(), **options)
    node, held = expected["rest"][0]["kernel"], arrays(wrapped)["layer"]["rest"][0]["kernel"]
    assert_same(held["raw"], node.raw)
    assert_same(nnx.to_pure_dict(held["residual"]), node.residual)
    assert_same({name: tuple(factors.values()) for name, factors in held["scales"].items()}, node.scales)
    assert set(arrays(wrapped)["layer"]["norm"]) == {"bias", "scale"}
    assert_same(arrays(plain), before)
    shared = {id(v) for _, v in nnx.to_flat_state(nnx.state(plain))}
    assert not shared & {id(v) for _, v in nnx.to_flat_state(nnx.state(wrapped))}


def test_statistics_and_random_streams_move_as_the_plain_layers_do():
    wrapped = Reparametrized(Block(nnx.Rngs(0)), "*kernel")
    folded = fold(wrapped)
    run = nnx.jit(lambda *modules: [module(X) for module in modules])
    for _ in range(2):
        np.testing.assert_allclose(*run(wrapped, folded), atol=1e-5)
    kinds = (nnx.BatchStat, nnx.RngCount)
    assert_same(arrays(wrapped.layer, kinds), arrays(folded, kinds), atol=1e-5)
    assert folded.rest[1].rngs.count[...] == 2
    wrapped.eval()
    folded.eval()
    # Captured by another transformation, too.
    np.testing.assert_allclose(*jax.jit(lambda x: (wrapped(x), folded(x)))(X), atol=1e-5)


def test_training_moves_scales_and_zero_biases():
    model = Pair(nnx.Rngs(0), start="exact", learn=("e", "n"))
    before = arrays(model)
    transform = optax.chain(optax.adamw(1e-2, mask=sel_jax.decay_mask), sel_jax.scale_rates({"n": 0.0}))
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(X) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    after = arrays(model)
    for name in ("kernel", "bias"):
        old, new = (tree["last"]["layer"][name] for tree in (before, after))
        assert np.all(new["scales"]["e"][0] != old["scales"]["e"][0])
        assert np.all(new["scales"]["n"][0] == old["scales"]["n"][0])
        assert np.all(new["raw"] != old["raw"])
    folded = fold(model)
    assert type(folded.first) is nnx.Linear and np.all(folded.last.bias[...] != 0)
    np.testing.assert_allclose(*nnx.jit(lambda a, b: (a(X), b(X)))(model, folded), atol=1e-5)


def test_labels_and_masks_know_a_states_arrays_by_their_names():
    model = Pair(nnx.Rngs(0), learn=("e", "n"), start="anchored")
    kernel = sel_jax.labels(arrays(model, ...))["first"]["layer"]["kernel"]
    assert jax.tree.leaves(kernel) == ["anchor", "anchor", "raw", "e", "e", "n", "n"]
    mask = sel_jax.decay_mask(nnx.state(model, nnx.Param))
    assert isinstance(mask["norm"]["scale"], nnx.Param) and nnx.as_pure(mask)["norm"]["scale"]
    assert jax.tree.leaves(mask["first"]["layer"]) == [True, True, False, False, False, False]
    constant = arrays(Pair(nnx.Rngs(0), learn=()))
    assert jax.tree.leaves(sel_jax.labels(constant)["first"]) == ["other", "raw"]


def test_scanned_layers_under_remat_and_grad():
    @nnx.vmap
    def make(key):
        return Pair(nnx.Rngs(key), rank=1, learn=("l", "m"))

    @nnx.jit
    def outputs(layers, plain):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return nnx.remat(lambda layer, x: layer(x))(layer, x)

        return run(layers, X), run(plain, X), nnx.grad(lambda layers: jnp.sum(run(layers, X) ** 2))(layers)

    layers = make(jax.random.split(jax.random.key(0), 3))
    output, expected, gradients = outputs(layers, fold(layers))
    np.testing.assert_allclose(output, expected, atol=1e-5)
    gradients = nnx.as_pure(gradients)["first"]["layer"]["kernel"]
    assert gradients["scales"]["m"][1].shape == (3, 1, 8) and gradients["residual"]["b"].shape == (3, 8, 1)
    assert all(np.any(factors[0]) for factors in gradients["scales"].values())


def test_fold_reaches_wrappers_in_lists_and_shared_ones_and_leaves_the_module():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = Reparametrized(nnx.Linear(8, 8, rngs=rngs), "kernel")
            self.rest = nnx.List([self.a, self.a])
            self.table = nnx.data({"a": self.a})

    tied = Tied(nnx.Rngs(0))
    folded = fold(tied)
    assert type(folded.a) is nnx.Linear
    assert folded.a is folded.rest[0] is folded.rest[1] is folded.table["a"]
    assert isinstance(tied.rest[0], Reparametrized)
    assert_same(arrays(fold(tied.a)), arrays(folded)["a"])


def test_orbax_and_split_merge_restore_the_arrays(tmp_path):
    model = Reparametrized(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), "kernel", start="anchored")
    other = Reparametrized(nnx.Linear(8, 6, rngs=nnx.Rngs(7)), "kernel", start="anchored")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "state", nnx.state(other)))
    for restored in (other, nnx.merge(*nnx.split(model))):
        assert_same(arrays(restored, ...), arrays(model, ...))
        np.testing.assert_array_equal(restored(X), model(X))


def test_metadata_and_kind_pass_to_the_raw_weights_and_back():
    class Kernel(nnx.Param):
        pass

    layer = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    layer.kernel = Kernel(layer.kernel[...], note="mine")
    wrapped = Reparametrized(layer, "kernel")
    for variable in (wrapped.layer.kernel.raw, fold(wrapped).kernel):
        assert type(variable) is Kernel and variable.note == "mine"


def test_errors():
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="'\\*weight' matches no parameter; the parameters are: bias, kernel"
    ):
        Reparametrized(linear, "*weight")
    with pytest.raises(TypeError, match="rngs=nnx.Rngs"):
        Reparametrized(linear, "kernel", rank=1)
    with pytest.raises(TypeError, match="betas"):
        Reparametrized(linear, "kernel", betas=1.0)
    other = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    other.kernel = linear.kernel
    with pytest.raises(ValueError, match="layers/0/kernel: held by two modules"):
        Reparametrized(nnx.Sequential(linear, other), "*kernel")
