"""GPT-2 in Flax Linen: its blocks are one block scanned over a leading layer axis.

Shapes in names: B sequences, T tokens, D model width, H heads, K features per head, F = 4D, V vocabulary.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from experiments.config import Model

INIT_STD = 0.02


def _dot(
    x: Array,
    kernel: Array,
    dimension_numbers: Any = None,
    precision: Any = None,
    result_dtype: DTypeLike | None = None,
) -> Array:
    # The `dot_general` of the Dense layers, which only ever contract x's last axis with the kernel's first:
    # x (B, T, in) times kernel (in, out), with one row per token. With two batch axes the kernel's gradient
    # transposes the activations first, and XLA's CPU backend fuses the GELU into that unvectorised loop:
    # rows take 0.7 of the time on a `tiny` step, 0.25 on an MLP.
    del dimension_numbers
    rows = x.reshape(-1, x.shape[-1])
    y = jnp.dot(rows, kernel, precision=precision, preferred_element_type=result_dtype)
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


# The head's operands have the compute dtype; its sums and its result are float32.
_head_dot = functools.partial(_dot, result_dtype=jnp.float32)


def _dense(config: Model, features: int, std: float, name: str) -> nn.Dense:
    return nn.Dense(
        features,
        use_bias=config.bias,
        dtype=config.compute_dtype,
        kernel_init=nn.initializers.normal(std),
        dot_general=_dot,
        name=name,
    )


def _residual_std(config: Model) -> float:
    # 2 * layers branches add up in the residual stream.
    return INIT_STD / (2 * config.layers) ** 0.5


def initial_std(config: Model, matrix: str) -> float:
    """Standard deviation of the initial entries of a matrix of the blocks, `attn/c_attn` and so on."""
    return _residual_std(config) if matrix.endswith("c_proj") else INIT_STD


def _layer_norm(config: Model, name: str) -> nn.LayerNorm:
    # Flax takes the statistics in float32 whatever the dtype.
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, use_bias=config.bias, dtype=config.compute_dtype, name=name
    )


class Attention(nn.Module):
    """Causal self-attention; sows its projected `query` and `key` (B, T, H, K) into "probes".

    Dropout acts on the output only: `jax.nn.dot_product_attention` has none for the probabilities.
    """

    config: Model
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        config = self.config
        qkv_BxTx3D = _dense(config, 3 * config.width, INIT_STD, "c_attn")(x_BxTxD)
        heads = (*x_BxTxD.shape[:2], config.heads, config.width // config.heads)
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = (x.reshape(heads) for x in jnp.split(qkv_BxTx3D, 3, axis=-1))
        self.sow("probes", "query", q_BxTxHxK)
        self.sow("probes", "key", k_BxTxHxK)
        y_BxTxHxK = jax.nn.dot_product_attention(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, is_causal=True)
        y_BxTxD = _dense(config, config.width, _residual_std(config), "c_proj")(
            y_BxTxHxK.reshape(x_BxTxD.shape)
        )
        return nn.Dropout(config.dropout, deterministic=self.deterministic)(y_BxTxD)


class MLP(nn.Module):
    """The position-wise network, four times as wide inside."""

    config: Model
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        config = self.config
        h_BxTxF = _dense(config, 4 * config.width, INIT_STD, "c_fc")(x_BxTxD)
        h_BxTxF = jax.nn.gelu(h_BxTxF, approximate=config.gelu == "tanh")
        y_BxTxD = _dense(config, config.width, _residual_std(config), "c_proj")(h_BxTxF)
        return nn.Dropout(config.dropout, deterministic=self.deterministic)(y_BxTxD)


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    config: Model
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> tuple[Array, None]:
        config = self.config
        x_BxTxD += Attention(config, self.deterministic, name="attn")(_layer_norm(config, "ln_1")(x_BxTxD))
        x_BxTxD += MLP(config, self.deterministic, name="mlp")(_layer_norm(config, "ln_2")(x_BxTxD))
        return x_BxTxD, None


class GPT2(nn.Module):
    """GPT-2: `GPT2(config).apply({"params": params}, tokens)` gives next-token logits.

    Every parameter of the blocks, under `h`, has a leading layer axis. With `mutable=["probes"]` the
    result is `(logits, {"probes": ...})`, where `probes["h"]["attn"]["query"]` and `["key"]` are
    1-tuples of arrays (layers, B, T, H, K).
    """

    config: Model
    unroll: bool = False
    """Write the layers out one by one: XLA's cost analysis counts a loop's body once."""

    @nn.compact
    def __call__(self, tokens_BxT: Array, deterministic: bool = True) -> Array:
        """Maps tokens (B, T) to float32 logits (B, T, V).

        Args:
          tokens_BxT: integers (B, T) in [0, vocab_size), T at most `config.context`.
          deterministic: False applies dropout, which needs a "dropout" key in `rngs`.

        Raises:
          ValueError: T exceeds the context.
        """
        config = self.config
        length = tokens_BxT.shape[-1]
        if length > config.context:
            raise ValueError(
                f"a sequence of {length} tokens exceeds the model's context of {config.context}: "
                "shorten it, or build the model with a larger context"
            )
        embed = functools.partial(
            nn.Embed,
            features=config.width,
            dtype=config.compute_dtype,
            embedding_init=nn.initializers.normal(INIT_STD),
        )
        wte = embed(config.vocab_size, name="wte")
        x_BxTxD = wte(tokens_BxT) + embed(config.context, name="wpe")(jnp.arange(length))
        x_BxTxD = nn.Dropout(config.dropout, deterministic=deterministic)(x_BxTxD)
        block = nn.remat(Block, prevent_cse=False) if config.remat else Block
        blocks = nn.scan(
            block,
            variable_axes={"params": 0, "probes": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.layers,
            unroll=config.layers if self.unroll else 1,
        )
        x_BxTxD, _ = blocks(config, deterministic, name="h")(x_BxTxD)
        x_BxTxD = _layer_norm(config, "ln_f")(x_BxTxD)
        if config.tied:
            return _head_dot(x_BxTxD, wte.embedding.T.astype(config.compute_dtype))
        return nn.Dense(
            config.vocab_size,
            use_bias=False,
            dtype=config.compute_dtype,
            kernel_init=nn.initializers.normal(INIT_STD),
            dot_general=_head_dot,
            name="lm_head",
        )(x_BxTxD)


def init_params(config: Model, key: Array) -> dict[str, Any]:
    """GPT-2's initial parameters, float32.

    Gaussians of standard deviation 0.02, and 0.02 / sqrt(2 * layers) for the projections into the
    residual stream; zero biases and unit gains.

    Args:
      config: the model's shape.
      key: a PRNG key.

    Returns:
      A dict of dicts; the blocks' parameters lie under `h`, each with a leading layer axis.
    """
    tokens_1x1 = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(GPT2(config).init)(key, tokens_1x1)["params"]
