"""Parameters of any framework, dtype and axis order get the same steps."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from optax.contrib import MuonDimensionNumbers

from manifold_muon import (
    DGram,
    DualAscent,
    Oblique,
    Stiefel,
    constraint_violations,
    manifold_muon,
    project_params,
    retract,
    scale_by_manifold_muon,
)

# Equality of steps is the question here, not their quality: few polynomials compile fast.
SOLVER = DualAscent(iterations=2, msign_steps=3)
KERNEL = MuonDimensionNumbers(-2, -1)
ATOL = 1e-5


def kernel(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def optimizer(assignment, dimension_numbers=KERNEL, **kwargs):
    return manifold_muon(
        0.02, assignment, dimension_numbers, adam_learning_rate=3e-3, solver=SOLVER, **kwargs
    )


def train(transform: optax.GradientTransformation, params: Any, gradients: list[Any]) -> Any:
    update = jax.jit(transform.update)
    state = transform.init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


# ---------------------------------------------------------------------------- containers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    kernel: Any
    bias: Any


class Pair(NamedTuple):
    first: Any
    second: Any


CONTAINERS = {
    "dict": (lambda k, b: {"kernel": k, "bias": b}, "kernel"),
    "nested": (lambda k, b: FrozenDict({"a": [Pair({"kernel": k}, b)]}), "*/kernel"),
    "tuple": (lambda k, b: (b, k), "1"),
    "dataclass": (Layer, "kernel"),
    "None": (lambda k, b: {"kernel": k, "bias": b, "a": None, "b": optax.MaskedNode()}, "kernel"),
    "nnx.State": (lambda k, b: nnx.State({"kernel": nnx.Param(k), "bias": nnx.Param(b)}), "kernel"),
}
LEAVES = (kernel(0, 4, 6), kernel(1, 6))
GRADIENTS = [(kernel(2 + i, 4, 6), kernel(5 + i, 6)) for i in range(2)]


@pytest.fixture(scope="module")
def by_dict() -> dict:
    make, pattern = CONTAINERS["dict"]
    params = project_params(make(*LEAVES), {pattern: Stiefel()})
    return train(optimizer({pattern: Stiefel()}), params, [make(*g) for g in GRADIENTS])


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name, by_dict):
    make, pattern = CONTAINERS[name]
    assignment = {pattern: Stiefel()}
    params = project_params(make(*LEAVES), assignment)
    assert jax.tree.structure(params) == jax.tree.structure(make(*LEAVES))
    trained = train(optimizer(assignment), params, [make(*g) for g in GRADIENTS])
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    expected = make(by_dict["kernel"], by_dict["bias"])
    chex.assert_trees_all_close(trained, expected, atol=ATOL)
    (violation,) = constraint_violations(trained, assignment).values()
    assert violation.shape == (1,) and violation[0] < 1e-5


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.mlp(x)))


def test_nnx_optimizer():
    """Three steps by `nnx.Optimizer` are those of the plain dict of its parameters."""
    assignment = {"mlp/kernel": DGram(), "out/kernel": Stiefel()}
    model = Mlp(nnx.Rngs(0))
    nnx.update(model, project_params(nnx.state(model, nnx.Param), assignment))
    x, y = kernel(0, 16, 4), kernel(1, 16, 4)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    initial = jnp.mean((model(x) - y) ** 2)

    optim = nnx.Optimizer(model, optimizer(assignment), wrt=nnx.Param)

    @nnx.jit
    def step(model, optim):
        gradients = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optim.update(model, gradients)

    for _ in range(3):
        step(model, optim)

    def loss(p):
        hidden = jax.nn.relu(x @ p["mlp"]["kernel"] + p["mlp"]["bias"])
        return jnp.mean((hidden @ p["out"]["kernel"] + p["out"]["bias"] - y) ** 2)

    transform = optimizer(assignment)
    state = transform.init(params)
    for _ in range(3):
        updates, state = jax.jit(transform.update)(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    trained = nnx.state(model, nnx.Param)
    chex.assert_trees_all_close(nnx.to_pure_dict(trained), params, atol=ATOL)
    violations = constraint_violations(trained, assignment)
    assert set(violations) == set(assignment)
    assert max(v.max() for v in violations.values()) < 1e-5
    assert jnp.mean((model(x) - y) ** 2) < initial


def test_init_on_abstract_parameters():
    params = {"kernel": kernel(0, 2, 4, 6), "bias": kernel(1, 6)}
    transform = optimizer({"kernel": Stiefel()}, mu_dtype=jnp.bfloat16)
    abstract = jax.eval_shape(transform.init, params)
    concrete = transform.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(transform.init, structs), concrete)
    # The state keeps its types from step to step, as scan and checkpoints want.
    _, after = jax.eval_shape(transform.update, params, abstract, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, concrete)


# ---------------------------------------------------------------------------- batches


def test_a_stack_is_its_matrices():
    """(L, in, out) gives each matrix the step it gets as a leaf of its own, next to others of its shape."""
    assignment = {"s*": Stiefel(), "d*": DGram(), "o*": Oblique()}
    keys = ("s", "d", "o")
    stacked = project_params({key: kernel(i, 3, 4, 6) for i, key in enumerate(keys)}, assignment)
    gradients = [{key: kernel(10 * step + i, 3, 4, 6) for i, key in enumerate(keys)} for step in (1, 2)]

    def separate(tree):
        return {f"{key}{i}": tree[key][i] for key in keys for i in range(3)}

    found = train(optimizer(assignment), stacked, gradients)
    apart = train(optimizer(assignment), separate(stacked), [separate(g) for g in gradients])
    chex.assert_trees_all_close(separate(found), apart, atol=ATOL)


def test_many_shapes_and_manifolds_at_once():
    """Leaves that share a solver call with others move as they do alone."""
    params = {"a": kernel(0, 4, 6), "b": kernel(1, 2, 6, 4), "c": kernel(2, 4, 6), "d": kernel(3, 3, 3)}
    gradients = {key: kernel(10 + i, *x.shape) for i, (key, x) in enumerate(params.items())}
    assignment = {"a": Stiefel(), "b": Stiefel(radius=2.0), "c": DGram(), "d": Stiefel("spectral")}
    params = project_params(params, assignment)
    together = train(optimizer(assignment), params, [gradients])
    alone = train(optimizer({"b": assignment["b"]}), {"b": params["b"]}, [{"b": gradients["b"]}])
    np.testing.assert_allclose(together["b"], alone["b"], atol=ATOL)
    for key, violation in constraint_violations(together, assignment).items():
        assert violation.max() < 1e-5, key


# ---------------------------------------------------------------------------- dimension numbers


# Every one of them holds matrices of fan-in 6 and fan-out 4.
LAYOUTS = {
    "equinox": ((4, 6), MuonDimensionNumbers(-1, -2), lambda x: x.T),
    "heads": ((2, 6, 3, 4), MuonDimensionNumbers(1, 3), lambda x: x.transpose(0, 2, 1, 3).reshape(6, 6, 4)),
    "heads as one": ((3, 6, 2, 2), MuonDimensionNumbers(1, (2, 3)), lambda x: x.reshape(3, 6, 4)),
    "output projection": ((3, 2, 4), MuonDimensionNumbers((0, 1), 2), lambda x: x.reshape(6, 4)),
    "fused": ((6, 3, 4), MuonDimensionNumbers(0, 2), lambda x: x.transpose(1, 0, 2)),
    "convolution": ((3, 1, 2, 4), MuonDimensionNumbers((0, 1, 2), 3), lambda x: x.reshape(6, 4)),
}


def test_dimension_numbers():
    """The same steps as the matrices cut out by hand."""
    assignment = {"heads*": DGram(), "*": Stiefel("spectral")}
    dims = {key: dims for key, (_, dims, _) in LAYOUTS.items()}

    def draw(seed):
        return {key: kernel(seed + i, *shape) for i, (key, (shape, _, _)) in enumerate(LAYOUTS.items())}

    def by_hand(tree):
        return {key: to_stack(tree[key]) for key, (_, _, to_stack) in LAYOUTS.items()}

    params, *gradients = (draw(10 * i) for i in range(3))
    params, plain = project_params(params, assignment, dims), project_params(by_hand(params), assignment)
    chex.assert_trees_all_close(by_hand(params), plain, atol=1e-6)
    found = train(optimizer(assignment, dims), params, gradients)
    expected = train(optimizer(assignment), plain, [by_hand(g) for g in gradients])
    chex.assert_trees_all_close(by_hand(found), expected, atol=ATOL)
    violations = constraint_violations(found, assignment, dims)
    chex.assert_trees_all_close(violations, constraint_violations(expected, assignment), atol=1e-6)
    assert max(v.max() for v in violations.values()) < 1e-5


def test_dimension_numbers_by_pattern():
    params = {"q": {"kernel": kernel(0, 6, 2, 3)}, "o": {"kernel": kernel(1, 2, 3, 6)}}
    dims = {"q/*": MuonDimensionNumbers(0, 2), "*": MuonDimensionNumbers((0, 1), 2)}
    assignment = {"*": Stiefel()}
    params = project_params(params, assignment, dims)
    for head in range(2):
        q = np.asarray(params["q"]["kernel"][:, head])
        np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-5)
    o = np.asarray(params["o"]["kernel"]).reshape(6, 6)
    np.testing.assert_allclose(o.T @ o, np.eye(6), atol=1e-5)
    violations = constraint_violations(params, assignment, dims)
    assert [v.shape for v in violations.values()] == [(1,), (2,)]
    assert max(v.max() for v in violations.values()) < 1e-5


def test_dimension_numbers_may_name_other_parameters():
    """They fit the parameters; that AdamW has one of those is no reason to refuse."""
    params = {"mlp": {"kernel": kernel(0, 4, 6)}, "embedding": kernel(1, 5, 4)}
    dims = {"*kernel": KERNEL, "embedding": MuonDimensionNumbers(-1, -2)}
    project_params(params, {"*kernel": Stiefel()}, dims)
    train(optimizer({"*kernel": Stiefel()}, dims), params, [params])


@pytest.mark.parametrize("call", ["optimizer", "transform"])
def test_nothing_assigned(call):
    """An empty assignment is all AdamW, as in an ablation; an empty tree has nothing to do."""
    if call == "optimizer":
        params = {"bias": kernel(0, 6)}
        found = train(optimizer({}), params, [params])
        chex.assert_trees_all_close(
            found, train(optax.adamw(3e-3, 0.9, 0.95, weight_decay=0.0), params, [params])
        )
    else:
        transform = scale_by_manifold_muon({})
        assert transform.update({}, transform.init({}), {})[0] == {}


# ---------------------------------------------------------------------------- bfloat16


def test_bfloat16_parameters():
    """They move like float32 ones, and hold their constraint to bfloat16's 8 bits."""
    assignment = {"w": Stiefel()}
    params = project_params({"w": kernel(0, 2, 8, 12)}, assignment)
    gradients = [{"w": kernel(1 + i, 2, 8, 12)} for i in range(3)]
    exact = train(optimizer(assignment), params, gradients)
    low, low_gradients = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, gradients))
    transform = optimizer(assignment)
    updates, _ = jax.eval_shape(transform.update, low_gradients[0], transform.init(low), low)
    assert updates["w"].dtype == jnp.bfloat16
    found = train(transform, low, low_gradients)
    assert found["w"].dtype == jnp.bfloat16
    assert 0 < constraint_violations(found, assignment)["w"].max() < 4e-3
    np.testing.assert_allclose(found["w"].astype(jnp.float32), exact["w"], atol=0.04)


def test_project_and_retract_keep_dtypes():
    low = {"w": kernel(0, 4, 6).astype(jnp.bfloat16), "b": jnp.ones(3, jnp.float16)}
    projected = project_params(low, {"w": Stiefel()})
    chex.assert_trees_all_equal_dtypes(projected, low)
    transform = retract({"w": Stiefel()})
    updates = {"w": 0.01 * kernel(1, 4, 6), "b": jnp.ones(3, jnp.float16)}
    found, _ = transform.update(updates, transform.init(projected), projected)
    chex.assert_trees_all_equal_dtypes(found, updates)


def test_float64_parameters():
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float64)}
        params = project_params(params, {"w": Stiefel()})
        transform = optimizer({"w": Stiefel()})
        updates, _ = transform.update({"w": jnp.sin(params["w"])}, transform.init(params), params)
        moved = optax.apply_updates(params, updates)
        assert moved["w"].dtype == jnp.float64
        assert constraint_violations(moved, {"w": Stiefel()})["w"].max() < 1e-13
