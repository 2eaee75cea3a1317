"""Data-parallel steps and sharded weights on eight devices: the same weights as on one, and shared work."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.benchmarks import hlo
from manifold_muon import (
    DualAscent,
    GramSolver,
    Stiefel,
    manifold_muon,
    named_assignment,
    project_params,
    retract,
    scale_by_manifold_muon,
)

HETERO = named_assignment("hetero")
SOLVERS = {
    "dual_ascent": DualAscent(iterations=2, msign_steps=3),
    "eigh": GramSolver(method="eigh", max_iterations=3),
    "products": GramSolver(method="products", max_iterations=3),
}
DEVICES = 8
KINDS = [AxisType.Explicit, AxisType.Auto]


def optimizer(solver: str, axis_name: str | None = None) -> optax.GradientTransformation:
    return manifold_muon(0.02, HETERO, adam_learning_rate=3e-3, solver=SOLVERS[solver], axis_name=axis_name)


def random_tree(seed: int, *leading: int) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"attn": {"kernel": (3, 4, 6)}, "mlp": {"kernel": (2, 6, 4)}, "ln": {"scale": (4,)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=leading + shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def assert_close(found, expected):
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), atol=1e-5)


PARAMS = project_params(random_tree(0), HETERO)
PER_DEVICE = [random_tree(30 + step, DEVICES) for step in range(2)]


def mean_over_devices(tree):
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), tree)


@functools.cache
def single_device(solver: str) -> dict:
    transform = optimizer(solver)
    params, state = PARAMS, transform.init(PARAMS)
    for gradient in PER_DEVICE:
        updates, state = jax.jit(transform.update)(mean_over_devices(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("axis_name", "solver"), [(None, "dual_ascent"), ("devices", "dual_ascent"), ("devices", "eigh")]
)
def test_pmap(axis_name, solver):
    """Each device alone, or with an axis name a share of the matrices each."""
    transform = optimizer(solver, axis_name)

    def step(params, state, gradient):
        updates, state = transform.update(jax.lax.pmean(gradient, "devices"), state, params)
        return optax.apply_updates(params, updates), state

    params, state = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (DEVICES, *jnp.shape(x))), tree)
        for tree in (PARAMS, transform.init(PARAMS))
    )
    step = jax.pmap(step, axis_name="devices")
    for gradient in PER_DEVICE:
        params, state = step(params, state, gradient)
    for device in (0, DEVICES - 1):
        assert_close(jax.tree.map(lambda x, d=device: x[d], params), single_device(solver))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("how", "solver"),
    [
        ("jit", "dual_ascent"),
        ("jit", "products"),
        ("shard_map", "dual_ascent"),
        ("shared shard_map", "products"),
    ],
)
def test_data_parallel(kind, how, solver):
    """Replicated weights, and a gradient from every device."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    transform = optimizer(solver, "data" if how == "shared shard_map" else None)

    def mean(gradient):
        if how == "jit":
            return mean_over_devices(gradient)
        return jax.lax.pmean(jax.tree.map(lambda x: x[0], gradient), "data")

    def step(params, state, gradient):
        updates, state = transform.update(mean(gradient), state, params)
        return optax.apply_updates(params, updates), state

    if how != "jit":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        step = jax.jit(step)
        params, state = jax.device_put((PARAMS, transform.init(PARAMS)), NamedSharding(mesh, P()))
        for gradient in jax.device_put(PER_DEVICE, NamedSharding(mesh, P("data"))):
            params, state = step(params, state, gradient)
    assert_close(params, single_device(solver))


PATTERN = {"*": Stiefel()}


def chain(solver: str) -> optax.GradientTransformation:
    direction = scale_by_manifold_muon(PATTERN, solver=SOLVERS[solver])
    return optax.chain(direction, optax.scale(-0.02), retract(PATTERN))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["stack", "matrix"])
@pytest.mark.parametrize(
    ("context", "solver"),
    [("set_mesh", "dual_ascent"), ("no context", "dual_ascent"), ("set_mesh", "products")],
)
def test_sharded_weights(kind, spec, context, solver):
    """Eight layers, each solved whole on one device: nothing is summed, and no loop communicates."""
    rng = np.random.default_rng(40)
    params, gradient = ({"w": rng.normal(size=(8, 8, 16)).astype(np.float32)} for _ in range(2))
    params = project_params(params, PATTERN)
    transform = chain(solver)
    expected, _ = jax.jit(transform.update)(gradient, transform.init(params), params)
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,))
    sharding = NamedSharding(mesh, spec)
    params, gradient = jax.device_put((params, gradient), sharding)
    state = transform.init(params)
    lower = jax.jit(transform.update).lower
    if context == "set_mesh":
        with jax.set_mesh(mesh):
            update = lower(gradient, state, params).compile()
    else:
        update = lower(gradient, state, params).compile()
    found, _ = update(gradient, state, params)
    assert_close(found, expected)
    if kind == AxisType.Explicit:
        assert found["w"].sharding.is_equivalent_to(sharding, 3)
    collectives = hlo.collectives(hlo.parse(update.as_text()))
    assert not [c for c in collectives if c.instruction.base_opcode.startswith(("all-reduce", "reduce"))]
    assert not [c for c in collectives if c.loops]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_few_matrices_on_many_devices(kind):
    """A stack is not filled up to the devices: no collective is larger than what it is made of."""
    rng = np.random.default_rng(42)
    params = project_params({"w": rng.normal(size=(3, 8, 16)).astype(np.float32)}, PATTERN)
    transform = chain("products")
    expected, _ = jax.jit(transform.update)(params, transform.init(params), params)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    params = jax.device_put(params, NamedSharding(mesh, P(None, "x", "y")))
    state = transform.init(params)
    update = jax.jit(transform.update).lower(params, state, params).compile()
    found, _ = update(params, state, params)
    assert_close(found, expected)
    collectives = hlo.collectives(hlo.parse(update.as_text()))
    assert collectives
    assert max(math.prod(shape.dims) for c in collectives for shape in c.shapes) <= 3 * 8 * 16
    assert not [c for c in collectives if c.loops]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("members", [8, 12])
def test_work_is_shared(kind, members):
    """Replicated weights on eight devices: each computes no more than a sixth of what one would."""
    rng = np.random.default_rng(41)
    params = project_params({"w": rng.normal(size=(members, 32, 64)).astype(np.float32)}, PATTERN)
    transform = chain("products")

    def flops(tree) -> float:
        update = jax.jit(transform.update).lower(tree, transform.init(tree), tree).compile()
        return update.cost_analysis()["flops"]

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,))
    alone, shared = flops(params), flops(jax.device_put(params, NamedSharding(mesh, P())))
    assert shared < alone / 5.8
