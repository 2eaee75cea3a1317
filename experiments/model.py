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
from spectral import Role, gaussian_sigma, spectral_normal

INIT_STD = 0.02
"""Of GPT-2's own initial entries, embeddings and matrices alike."""
_FANS = {"attn/c_attn": (1, 3), "attn/c_proj": (1, 1), "mlp/c_fc": (1, 4), "mlp/c_proj": (4, 1)}


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


def _dense(config: Model, matrix: str) -> nn.Dense:
    _, name = matrix.split("/")
    return nn.Dense(
        _FANS[matrix][1] * config.width,
        use_bias=config.bias,
        dtype=config.compute_dtype,
        kernel_init=nn.initializers.normal(initial_std(config, matrix)),
        dot_general=_dot,
        name=name,
    )


def initial_std(config: Model, matrix: str) -> float:
    """Standard deviation of the initial entries of a matrix of the blocks, `attn/c_attn` and so on."""
    fan_in, fan_out = (ratio * config.width for ratio in _FANS[matrix])
    std = gaussian_sigma(Role.MATRIX, fan_in, fan_out) if config.spectral else INIT_STD
    # 2 * layers branches add up in the residual stream.
    return std / (2 * config.layers) ** 0.5 if matrix.endswith("c_proj") else std


def attention_scale(config: Model) -> float:
    """What queries' products with keys are multiplied by.

    1 / sqrt(K), which suits the random queries and keys of the start; in the spectral parametrisation it is
    that at the base's head size and falls as 1 / K from there, as trained queries and keys align.

    Source: arXiv:2203.03466, section 5.
    """
    size = config.width // config.heads
    if not config.spectral:
        return size**-0.5
    return (config.base_width // config.base_heads) ** 0.5 / size


def output_multiplier(config: Model) -> float:
    """What a tied head's products are multiplied by: in the spectral parametrisation, base width / width.

    The embedding has entries of a size that does not depend on the width, so that trained logits, sums over
    the width, would grow with it. Those at the start, sums of random signs, shrink by design.
    """
    return config.output_scale * config.base_width / config.width if config.spectral else 1.0


def _layer_norm(config: Model, name: str) -> nn.LayerNorm:
    # Flax takes the statistics in float32 whatever the dtype.
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon, use_bias=config.bias, dtype=config.compute_dtype, name=name
    )


class Attention(nn.Module):
    """Causal self-attention.

    It sows its projected `query` and `key` (B, T, H, K) into "probes", and what `c_proj` is given.

    Dropout acts on the output only: `jax.nn.dot_product_attention` has none for the probabilities.
    """

    config: Model
    deterministic: bool
    decode: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        config = self.config
        qkv_BxTx3D = _dense(config, "attn/c_attn")(x_BxTxD)
        heads = (*x_BxTxD.shape[:2], config.heads, config.width // config.heads)
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = (x.reshape(heads) for x in jnp.split(qkv_BxTx3D, 3, axis=-1))
        self.sow("probes", "query", q_BxTxHxK)
        self.sow("probes", "key", k_BxTxHxK)
        mask = None
        if self.decode:
            k_BxTxHxK, v_BxTxHxK, mask = self._cached(k_BxTxHxK, v_BxTxHxK)
        y_BxTxHxK = jax.nn.dot_product_attention(
            q_BxTxHxK,
            k_BxTxHxK,
            v_BxTxHxK,
            mask=mask,
            is_causal=not self.decode,
            scale=attention_scale(config),
        )
        y_BxTxD = y_BxTxHxK.reshape(x_BxTxD.shape)
        self.sow("probes", "c_proj_input", y_BxTxD)
        y_BxTxD = _dense(config, "attn/c_proj")(y_BxTxD)
        return nn.Dropout(config.dropout, deterministic=self.deterministic)(y_BxTxD)

    def _cached(self, k_BxTxHxK: Array, v_BxTxHxK: Array) -> tuple[Array, Array, Array]:
        """Keys and values of the whole context, these ones put behind the earlier, and who may see whom."""
        length, context = k_BxTxHxK.shape[1], self.config.context
        seen = self.variable("cache", "seen", jnp.zeros, (), jnp.int32)
        whole = []
        for name, new in (("key", k_BxTxHxK), ("value", v_BxTxHxK)):
            shape = (new.shape[0], context, *new.shape[2:])
            cache = self.variable("cache", name, jnp.zeros, shape, new.dtype)
            cache.value = jax.lax.dynamic_update_slice_in_dim(cache.value, new, seen.value, axis=1)
            whole.append(cache.value)
        mask_TxS = jnp.arange(context) <= seen.value + jnp.arange(length)[:, None]
        seen.value += length
        return *whole, mask_TxS[None, None]


class MLP(nn.Module):
    """The position-wise network, four times as wide inside; sows what `c_proj` is given."""

    config: Model
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> Array:
        config = self.config
        h_BxTxF = _dense(config, "mlp/c_fc")(x_BxTxD)
        h_BxTxF = jax.nn.gelu(h_BxTxF, approximate=config.gelu == "tanh")
        self.sow("probes", "c_proj_input", h_BxTxF)
        y_BxTxD = _dense(config, "mlp/c_proj")(h_BxTxF)
        return nn.Dropout(config.dropout, deterministic=self.deterministic)(y_BxTxD)


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream; sows it as `stream`."""

    config: Model
    deterministic: bool
    decode: bool

    @nn.compact
    def __call__(self, x_BxTxD: Array) -> tuple[Array, None]:
        config = self.config
        attention = Attention(config, self.deterministic, self.decode, name="attn")
        x_BxTxD += attention(_layer_norm(config, "ln_1")(x_BxTxD))
        x_BxTxD += MLP(config, self.deterministic, name="mlp")(_layer_norm(config, "ln_2")(x_BxTxD))
        self.sow("probes", "stream", x_BxTxD)
        return x_BxTxD, None


class GPT2(nn.Module):
    """GPT-2: `GPT2(config).apply({"params": params}, tokens)` gives next-token logits.

    Every parameter of the blocks, under `h`, has a leading layer axis. With `mutable=["probes"]` the
    result is `(logits, {"probes": ...})`, where `probes["h"]` has, as 1-tuples of arrays with a leading
    layer axis, the blocks' `stream` (B, T, D), the `query` and `key` (B, T, H, K) of `attn`, and the
    `c_proj_input` (B, T, D or F) of `attn` and `mlp`.
    """

    config: Model
    unroll: bool = False
    """Write the layers out one by one: XLA's cost analysis counts a loop's body once."""
    decode: bool = False
    """Take the tokens as the continuation of those of earlier calls, kept in the collection "cache"."""

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
            embedding_init=nn.initializers.normal(config.embedding_std if config.spectral else INIT_STD),
        )
        wte = embed(config.vocab_size, name="wte")
        positions = jnp.arange(length)
        if self.decode:
            seen = self.variable("cache", "seen", jnp.zeros, (), jnp.int32)
            positions += seen.value
            seen.value += length
        x_BxTxD = wte(tokens_BxT) + embed(config.context, name="wpe")(positions)
        x_BxTxD = nn.Dropout(config.dropout, deterministic=deterministic)(x_BxTxD)
        block = nn.remat(Block, prevent_cse=False) if config.remat else Block
        blocks = nn.scan(
            block,
            variable_axes={"params": 0, "probes": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.layers,
            unroll=config.layers if self.unroll else 1,
        )
        x_BxTxD, _ = blocks(config, deterministic, self.decode, name="h")(x_BxTxD)
        x_BxTxD = _layer_norm(config, "ln_f")(x_BxTxD)
        if config.tied:
            return _head_dot(
                output_multiplier(config) * x_BxTxD, wte.embedding.T.astype(config.compute_dtype)
            )
        return nn.Dense(
            config.vocab_size,
            use_bias=False,
            dtype=config.compute_dtype,
            kernel_init=spectral_normal() if config.spectral else nn.initializers.normal(INIT_STD),
            dot_general=_head_dot,
            name="lm_head",
        )(x_BxTxD)


def init_params(config: Model, key: Array) -> dict[str, Any]:
    """GPT-2's initial parameters, float32.

    Gaussians of standard deviation 0.02, and 0.02 / sqrt(2 * layers) for the projections into the
    residual stream; zero biases and unit gains. In the spectral parametrisation, matrices have spectral norms
    of about sqrt(fan_out / fan_in), over sqrt(2 * layers) for those projections.

    Args:
      config: the model's shape.
      key: a PRNG key.

    Returns:
      A dict of dicts; the blocks' parameters lie under `h`, each with a leading layer axis.
    """
    tokens_1x1 = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(GPT2(config).init)(key, tokens_1x1)["params"]
