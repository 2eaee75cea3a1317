"""Path names of every kind of pytree, and the precedence of patterns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from spectral.paths import map_named, match, named_leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    kernel: Any
    bias: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def names(tree: Any) -> list[str]:
    return [name for name, _ in named_leaves(tree)]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"h": {"attn": {"kernel": 1, "bias": 2}}}, ["h/attn/bias", "h/attn/kernel"]),
        (FrozenDict({"h": {"kernel": 1}}), ["h/kernel"]),
        (({"kernel": 1}, [2, 3]), ["0/kernel", "1/0", "1/1"]),
        (Layer(kernel=1, bias=Layer(2, 3)), ["kernel", "bias/kernel", "bias/bias"]),
        (Pair(1, {"x": 2}), ["first", "second/x"]),
        ({"layers": [Layer(1, None), Layer(2, optax.MaskedNode())]}, ["layers/0/kernel", "layers/1/kernel"]),
        ({"linear/~/w": 1}, ["linear/~/w"]),  # Haiku
        ({0: {"w": 1}}, ["0/w"]),
        ({"value": {"kernel": 1}}, ["value/kernel"]),
        ({"a": None, "b": optax.MaskedNode()}, []),
        (1.0, [""]),
    ],
    ids=str,
)
def test_names(tree, expected):
    assert names(tree) == expected


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])


def test_nnx_state_has_no_value_in_its_names():
    model = Block(nnx.Rngs(0))
    expected = ["attn/bias", "attn/kernel", "layers/0/bias", "layers/0/kernel"]
    assert names(nnx.state(model, nnx.Param)) == expected
    assert names(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == expected
    found = match(nnx.state(model, nnx.Param), {"attn/kernel": "a", "*kernel": "b"})
    assert found == {"attn/kernel": "a", "layers/0/kernel": "b"}


def test_linen_boxes_have_no_value_in_their_names():
    box = nn.Partitioned(jnp.ones(2), names=("model",))
    assert names({"dense": {"kernel": box, "bias": jnp.ones(2)}}) == ["dense/bias", "dense/kernel"]
    doubled = map_named(lambda name, x: 2 * x, {"kernel": box})
    assert isinstance(doubled["kernel"], nn.Partitioned)


def test_a_key_named_value_keeps_its_name():
    tree = {"attn": {"query": 1, "key": 2, "value": 3}}
    assert names(tree) == ["attn/key", "attn/query", "attn/value"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attention:
    query: Any
    key: Any
    value: Any


def test_a_field_named_value_keeps_its_name():
    """Equinox modules and dataclasses are not NNX variables, whose field of that name is cut off."""
    assert names({"attn": Attention(1, 2, 3)}) == ["attn/query", "attn/key", "attn/value"]


def test_two_leaves_of_one_name():
    with pytest.raises(ValueError, match="more than one parameter is called a/b"):
        match({"a/b": 1, "a": {"b": 2}}, {"*": 0})


def test_map_named():
    tree = {"b": 1, "a": (2, None), "c": optax.MaskedNode()}
    found = map_named(
        lambda name, leaf, other: f"{name} {leaf} {other}",
        tree,
        {"b": 3, "a": (4, None), "c": optax.MaskedNode()},
    )
    assert found == {"b": "b 1 3", "a": ("a/0 2 4", None), "c": optax.MaskedNode()}
    state = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
    named = map_named(lambda name, leaf: name, state)
    assert jax.tree.leaves(named) == names(state)


def test_leaves_come_with_their_names():
    tree = {"b": jnp.ones(3), "a": (jnp.zeros(2),)}
    assert [(name, leaf.shape) for name, leaf in named_leaves(tree)] == [("a/0", (2,)), ("b", (3,))]


def test_the_first_pattern_that_fits_decides():
    tree = {"attn": {"kernel": 1}, "mlp": {"kernel": 2, "bias": 3}}
    assert match(tree, {"attn/*": "a", "*kernel": "b"}) == {"attn/kernel": "a", "mlp/kernel": "b"}
    assert match(tree, {"*kernel": "b", "attn/*": "a"}) == {"attn/kernel": "b", "mlp/kernel": "b"}
    assert match(tree, {"*": None}) == {"attn/kernel": None, "mlp/bias": None, "mlp/kernel": None}
    assert match(tree, {}) == {}


def test_patterns_are_globs_and_mind_case():
    tree = {"Dense_0": {"kernel": 1}, "Dense_1": {"kernel": 2}}
    assert match(tree, {"Dense_[0-9]/kernel": 0}) == {"Dense_0/kernel": 0, "Dense_1/kernel": 0}
    assert match(tree, {"Dense_?/k*": 0}) == {"Dense_0/kernel": 0, "Dense_1/kernel": 0}
    with pytest.raises(ValueError):
        match(tree, {"dense*": 0})
    with pytest.raises(ValueError):  # a pattern is for the whole path
        match(tree, {"kernel": 0})


def test_a_pattern_that_fits_nothing_is_an_error():
    tree = {f"layer_{i:02}": i for i in range(30)}
    with pytest.raises(ValueError) as error:
        match(tree, {"layer_00": 0, "*kernel": 1})
    message = str(error.value)
    assert "pattern '*kernel' matches no parameter; the parameters are: layer_00, layer_01" in message
    assert "layer_19, ..." in message and "layer_20" not in message
    with pytest.raises(ValueError, match="the parameters are: a$"):
        match({"a": 1}, {"b": 0})
