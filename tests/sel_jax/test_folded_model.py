"""GPT-2 with folded weights is the ordinary model: the same program, and the same logits."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Model
from experiments.model import GPT2, init_params
from sel_jax import SelWeight, effective, fold, reparametrize
from spectral import KERNEL

CONFIG = Model(layers=2, width=16, heads=2, context=8, vocab_size=32, bias=True)
TOKENS = jnp.arange(16).reshape(2, 8) % 32
WHERE = {"h/*kernel": KERNEL, "h/*bias": None, "wte/*": KERNEL}  # the biases are stacks of vectors


@jax.jit
def apply(params):
    return GPT2(CONFIG).apply({"params": params}, TOKENS)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def nodes(params):
    return jax.jit(lambda x: reparametrize(x, WHERE, beta=4.0, start="exact"))(params)


def program(params) -> str:
    """Compiled HLO, without the names of sources and instructions."""
    text = apply.lower(params).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "", text, flags=re.M)


def test_where_the_nodes_are(nodes):
    is_node = lambda x: isinstance(x, SelWeight)  # noqa: E731
    found = [x for x in jax.tree.leaves(nodes, is_leaf=is_node) if is_node(x)]
    # A kernel and a bias of four layers, the biases of two norms, and the embedding.
    assert len(found) == 11
    assert nodes["h"]["ln_1"]["bias"].scales["e"][0].shape == (2, 1)
    assert nodes["h"]["attn"]["c_attn"]["kernel"].scales["e"][0].shape == (2, 16, 1)


def test_the_program(nodes, params):
    folded = fold(nodes)
    chex.assert_trees_all_equal_shapes_and_dtypes(folded, params)
    expected = program(params)
    assert "ENTRY" in expected and program(folded) == expected
    assert "exponential-minus-one" not in expected
    training = jax.jit(lambda x: apply(effective(x))).lower(nodes).compile().as_text()
    assert "exponential-minus-one" in training or "expm1" in training


def test_logits(nodes, params):
    expected = apply(params)
    np.testing.assert_allclose(apply(fold(nodes)), expected, atol=2e-5 * float(np.abs(expected).max()))
    anchored = reparametrize(params, {"h/*kernel": KERNEL}, beta=4.0, start="anchored")
    np.testing.assert_array_equal(apply(fold(anchored)), expected)


def test_after_training(nodes):
    """Folded logits are those of training, when nothing is any longer where it started."""
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: np.asarray(x) + np.float32(rng.normal(size=x.shape) / 50), nodes)
    found, expected = apply(fold(trained)), jax.jit(lambda x: apply(effective(x)))(trained)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(np.abs(expected).max()))
    assert np.abs(found - apply(fold(nodes))).max() > 1e-3
