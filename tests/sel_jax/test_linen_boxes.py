"""The Linen wrapper on weights in boxes with their axes' names, as sharded models have them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, PartitionSpec

import sel_jax
from sel_jax.linen import Reparametrized

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 16))
NAMES = {"partitioned": (None, "model"), "logical": ("embed", "heads"), "short": ("data",)}


class Model(nn.Module):
    """A layer whose kernel's axes have names, in the wrapper if options are given."""

    names: tuple
    options: dict | None = None

    @nn.compact
    def __call__(self, x, _=None):
        box = nn.with_logical_partitioning if "embed" in self.names else nn.with_partitioning
        layer = nn.Dense(16, kernel_init=box(nn.initializers.lecun_normal(), self.names))
        return (layer if self.options is None else Reparametrized(layer, **self.options))(x), None


def stacked(*arguments):
    return nn.scan(
        Model,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(*arguments)


def two_by_four() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", [Model, stacked], ids=["layer", "scan"])
def test_boxed_weights_are_those_without_boxes(name: str, model) -> None:
    options = {"where": "*kernel", "start": "anchored", "rank": 2}
    plain, wrapped = model(NAMES[name]), model(NAMES[name], options)
    (expected, weights), (output, variables) = (m.init_with_output(KEY, X) for m in (plain, wrapped))
    np.testing.assert_allclose(output[0], expected[0], rtol=0, atol=2e-6)
    folded = sel_jax.fold(nn.unbox(variables))
    jax.tree.map(np.testing.assert_array_equal, folded, nn.unbox(weights))
    output = wrapped.apply(variables, X)[0]  # this time with nodes that are already there
    np.testing.assert_allclose(output, expected[0], rtol=0, atol=2e-6)


def test_names_of_axes() -> None:
    options = {"where": "*kernel", "start": "anchored", "rank": 2}
    specs = nn.get_partition_spec(jax.eval_shape(stacked(("data", "model"), options).init, KEY, X))
    node = specs["params"]["Dense_0"]["kernel"]
    whole = PartitionSpec("layers", "data", "model")
    rows, columns = PartitionSpec("layers", "data", None), PartitionSpec("layers", None, "model")
    assert (node.raw, node.anchor) == (whole, {"raw": whole, "weight": whole})
    assert node.scales == dict.fromkeys(sel_jax.SCALES, (rows, columns))
    assert node.residual == {"b": rows, "a": columns}
    assert specs["params"]["Dense_0"]["bias"] == PartitionSpec()


def test_a_sharded_model_trains_as_one_on_one_device() -> None:
    model, optimizer = Model(("data", "model"), {"where": "*kernel"}), optax.adam(1e-2)

    def trained(variables):
        def step(carry, _):
            variables, state = carry
            gradient = jax.grad(lambda v: jnp.mean((model.apply(v, X)[0] - 1) ** 2))(variables)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(variables, updates), state), None

        return jax.lax.scan(step, (variables, optimizer.init(variables)), length=5)[0][0]

    alone = jax.jit(lambda key: trained(model.init(key, X)))(KEY)
    mesh = two_by_four()
    shardings = nn.get_sharding(jax.eval_shape(model.init, KEY, X), mesh)
    with jax.set_mesh(mesh):
        variables = jax.jit(model.init, out_shardings=shardings)(KEY, X)
        sharded = jax.jit(trained, out_shardings=shardings)(variables)
    node = nn.unbox(sharded)["params"]["Dense_0"]["kernel"]
    assert node.raw.sharding.spec == PartitionSpec("data", "model")
    assert [x.sharding.spec for x in node.scales["e"]] == [
        PartitionSpec("data", None),
        PartitionSpec(None, "model"),
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), sharded, alone)
