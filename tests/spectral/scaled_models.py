"""Small language models of several frameworks at any width, and what the table says of them by hand."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LAYERS, VOCABULARY, INPUTS = 2, 50, 10
STACKED = ("h/*",)


def shapes(width: int) -> dict[str, Any]:
    """Flax's names and layouts; the blocks are stacked."""
    tree = {
        "wte": {"embedding": (VOCABULARY, width)},
        "patches": {"kernel": (INPUTS, width), "bias": (width,)},
        "h": {
            "ln_1": {"scale": (LAYERS, width), "bias": (LAYERS, width)},
            "attn": {"kernel": (LAYERS, width, 3 * width), "bias": (LAYERS, 3 * width)},
            "up": {"kernel": (LAYERS, width, 4 * width)},
            "down": {"kernel": (LAYERS, 4 * width, width)},
        },
        "lm_head": {"kernel": (width, VOCABULARY), "bias": (VOCABULARY,)},
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def ones(width: int) -> dict[str, Any]:
    return jax.tree.map(lambda x: jnp.ones(x.shape), shapes(width))


# Multipliers at 8 times the base's width: eta(8 n) / eta(n), worked out on paper from the three columns.
EIGHTFOLD = {
    # path: (SGD, Adam, Muon)
    "wte/embedding": (8, 1, None),
    "patches/kernel": (8, 1, 8**0.5),  # fan_in fixed
    "patches/bias": (8, 1, None),
    "h/ln_1/scale": (8, 1, None),
    "h/ln_1/bias": (8, 1, None),
    "h/attn/kernel": (1, 1 / 8, 1),
    "h/attn/bias": (8, 1, None),
    "h/up/kernel": (1, 1 / 8, 1),
    "h/down/kernel": (1, 1 / 8, 1),
    "lm_head/kernel": (1 / 8, 1 / 8, 8**-0.5),  # fan_out fixed
    "lm_head/bias": (1, 1, None),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """What an Equinox module is to JAX: a dataclass with a `weight` (out, in) and a `bias`."""

    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    embed: Layer
    layers: list[Layer]
    norm: Layer
    head: Layer


def equinox_like(width: int) -> Model:
    return Model(
        Layer(jnp.ones((VOCABULARY, width)), None),
        [Layer(jnp.ones((4 * width, width)), jnp.ones(4 * width)), Layer(jnp.ones((width, 4 * width)), None)],
        Layer(jnp.ones(width), jnp.ones(width)),
        Layer(jnp.ones((VOCABULARY, width)), None),
    )


class NnxModel(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * width, rngs=rngs)
        self.head = nnx.Linear(4 * width, VOCABULARY, use_bias=False, rngs=rngs)


def nnx_state(width: int) -> nnx.State:
    abstract = jax.eval_shape(lambda: nnx.state(NnxModel(width, nnx.Rngs(0)), nnx.Param))
    return jax.tree.map(lambda x: jnp.ones(x.shape), abstract)
