"""Nodes under whole optimisers: spectral rates, both Muons, JAX's transformations, and eight devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

from manifold_muon import Unconstrained, manifold_muon
from sel_jax import annealed, decay_mask, effective, fold, labels, reparametrize, scale_rates
from spectral import Role, learning_rate_scale

DEVICES = 8
STEPS = 30
RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(32, 6)))
Y = np.float32(np.tanh(X @ RNG.normal(size=(6, 4))))
SHAPES = {"first": {"bias": (8,), "kernel": (6, 8)}, "second": {"kernel": (8, 4)}}
NODES = "first/*"


def params(seed: int = 1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape) * (len(shape) - 1) / np.sqrt(shape[0])),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


convert = jax.jit(functools.partial(reparametrize, where=NODES, beta=2.0))


def loss(nodes, x=X, y=Y):
    weights = effective(nodes)
    hidden = jnp.tanh(x @ weights["first"]["kernel"] + weights["first"]["bias"])
    return jnp.mean((hidden @ weights["second"]["kernel"] - y) ** 2)


def kinds(nodes):
    """`muon` for the raw matrices, `adam` for all else."""
    return jax.tree.map(
        lambda label, x: "muon" if label == "raw" and jnp.ndim(x) > 1 else "adam", labels(nodes), nodes
    )


@functools.cache
def spectral_multiplier(path: str) -> float:
    """The spectral condition's learning rate for Adam, by the layer's shape."""
    layer, name = path.split("/")[:2]
    role = Role.MATRIX if name == "kernel" else Role.BIAS
    return learning_rate_scale(role, "adam", *SHAPES[layer]["kernel"])


def by_width(updates):
    def scale(path, label, update):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return update * spectral_multiplier(name) if label == "raw" else update

    return jax.tree_util.tree_map_with_path(scale, labels(updates), updates)


def optimizer(name: str) -> optax.GradientTransformation:
    adam = optax.adamw(0.05, weight_decay=1e-3, mask=decay_mask)
    rates = scale_rates(annealed(STEPS))
    if name == "spectral":
        return optax.chain(adam, optax.stateless(lambda updates, params: by_width(updates)), rates)
    matrices = {
        "manifold_muon": lambda: manifold_muon(0.05, {"*raw": Unconstrained()}, adam_learning_rate=0.05),
        "optax muon": lambda: muon(
            0.05,
            muon_weight_dimension_numbers=lambda x: jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), x),
        ),
    }[name]()
    return optax.chain(optax.partition({"muon": matrices, "adam": adam}, kinds(convert(params()))), rates)


def train(transform, nodes, steps: int = STEPS):
    """(nodes, losses) of a scan."""

    def step(carry, _):
        nodes, state = carry
        error, gradient = jax.value_and_grad(loss)(nodes)
        updates, state = transform.update(gradient, state, nodes)
        return (optax.apply_updates(nodes, updates), state), error

    (nodes, _), errors = jax.lax.scan(step, (nodes, transform.init(nodes)), length=steps)
    return nodes, errors


@pytest.mark.parametrize("name", ["spectral", "manifold_muon", "optax muon"])
def test_training(name):
    nodes = convert(params())
    trained, errors = jax.jit(functools.partial(train, optimizer(name)))(nodes)
    assert errors[-1] < errors[0] / 3
    change = jax.tree.map(lambda x, y: np.abs(x - y).max(), trained, nodes)
    assert min(jax.tree.leaves(change)) > 1e-5  # n's second factor too, once the first is off zero
    np.testing.assert_allclose(loss(fold(trained)), loss(trained), rtol=1e-5)


def test_seeds_in_parallel():
    run = functools.partial(train, optimizer("spectral"), steps=5)
    seeds = [params(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *seeds)
    found, _ = jax.jit(jax.vmap(lambda x: run(reparametrize(x, NODES, beta=2.0))))(stacked)
    alone = jax.jit(run)
    for i, seed in enumerate(seeds):
        expected, _ = alone(convert(seed))
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], found), expected, atol=1e-5)


# ---------------------------------------------------------------------------- devices


@functools.cache
def one_device():
    return jax.jit(functools.partial(train, optimizer("spectral"), steps=3))(convert(params()))[0]


def assert_close(found):
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(one_device()), atol=1e-5)


def test_pmap():
    transform = optimizer("spectral")

    def step(nodes, state, x, y):
        gradient = jax.lax.pmean(jax.grad(loss)(nodes, x, y), "data")
        updates, state = transform.update(gradient, state, nodes)
        return optax.apply_updates(nodes, updates), state

    nodes = convert(params())
    nodes, state = (
        jax.tree.map(lambda x: np.broadcast_to(x, (DEVICES, *np.shape(x))), tree)
        for tree in (nodes, transform.init(nodes))
    )
    x, y = (data.reshape(DEVICES, -1, data.shape[-1]) for data in (X, Y))
    step = jax.pmap(step, axis_name="data")
    for _ in range(3):
        nodes, state = step(nodes, state, x, y)
    for device in (0, DEVICES - 1):
        assert_close(jax.tree.map(lambda x, d=device: x[d], nodes))


def test_shard_map():
    """Replicated nodes, a part of the data on every device; the mean's derivative sums over the devices."""
    transform = optimizer("spectral")
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def step(nodes, state, x, y):
        gradient = jax.grad(lambda nodes: jax.lax.pmean(loss(nodes, x, y), "data"))(nodes)
        updates, state = transform.update(gradient, state, nodes)
        return optax.apply_updates(nodes, updates), state

    specs = (P(), P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P())))
    nodes = convert(params())
    state = transform.init(nodes)
    for _ in range(3):
        nodes, state = step(nodes, state, X, Y)
    assert_close(nodes)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axis", [-2, -1])
def test_sharded_weights(kind, axis):
    """A matrix split over the devices, with the factor along that axis: the same weights and gradients."""
    weights = {"k": np.float32(RNG.normal(size=(8, 16)) / 4)}
    nodes = reparametrize(weights, "k", beta=2.0)
    gradient = jax.jit(jax.grad(lambda nodes: jnp.sum(jnp.sin(effective(nodes)["k"]))))
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,))

    def place(x):
        spec = [None, None]
        spec[axis] = "x" if x.shape[axis] > 1 else None
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    expected = gradient(nodes)
    with jax.set_mesh(mesh):
        found = gradient(jax.tree.map(place, nodes))
        folded = fold(jax.tree.map(place, nodes))
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=1e-5)
    np.testing.assert_allclose(jax.device_get(folded["k"]), fold(nodes)["k"], rtol=1e-6)
    assert found["k"].raw.sharding.is_equivalent_to(place(nodes["k"].raw).sharding, 2)
