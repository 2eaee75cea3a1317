"""Text from a trained model, a token at a time; keys and values of what came before are kept."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.config import Model
from experiments.errors import InputError
from experiments.exchange.folders import load_run
from experiments.model import GPT2
from sel_jax import fold


@functools.partial(jax.jit, static_argnames=("config", "count"))
def generate(
    config: Model, params: Any, prompt_BxT: Array, count: int, temperature: Array, key: Array
) -> Array:
    """Continues sequences.

    Args:
      config: the model's shape.
      params: of `GPT2(config)`, ordinary.
      prompt_BxT: tokens (B, T), at least one.
      count: tokens to add; T and they fit in the context together.
      temperature: what the logits are divided by before one is drawn; at 0 the likeliest is taken.
      key: a PRNG key.

    Returns:
      The added tokens (B, count).
    """
    model = GPT2(config, decode=True)

    def choose(logits_BxV: Array, key: Array) -> Array:
        drawn = jax.random.categorical(key, logits_BxV / jnp.where(temperature > 0, temperature, 1))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits_BxV, axis=-1))

    def step(carry: tuple[Array, Any], key: Array) -> tuple[tuple[Array, Any], Array]:
        logits_BxV, cache = carry
        token_B = choose(logits_BxV, key)
        logits, cache = model.apply({"params": params, **cache}, token_B[:, None], mutable=["cache"])
        return (logits[:, -1], cache), token_B

    logits, cache = model.apply({"params": params}, prompt_BxT, mutable=["cache"])
    # The last token's own logits are nobody's business, so its step is one too many; that is cheap.
    _, tokens = jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, count))
    return tokens.T


def sample(run_dir: Path, prompt: str, count: int, temperature: float = 0.0, seed: int = 0) -> str:
    """Continues a text with a run's model, as its latest checkpoint has it.

    Args:
      run_dir: of the run.
      prompt: how the text begins; at least one byte.
      count: bytes to add.
      temperature: 0 takes the likeliest byte each time.
      seed: of the draws.

    Returns:
      What was added, its bytes read as UTF-8.

    Raises:
      InputError: there is no such run, it does not read bytes, or the text does not fit in its context.
    """
    config, state = load_run(run_dir)
    model = config.model
    if model.vocab_size != 256:
        raise InputError(
            f"{run_dir} has a vocabulary of {model.vocab_size}: only models of bytes are sampled here"
        )
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    if len(tokens) == 0 or count < 1 or temperature < 0:
        raise InputError("a prompt of at least one byte, a count of at least 1 and a temperature not below 0")
    if len(tokens) + count > model.context:
        raise InputError(
            f"{len(tokens)} bytes of prompt and {count} more exceed the model's context of {model.context}: "
            "shorten one of them"
        )
    added = generate(
        model, fold(state.params), tokens[None], count, jnp.float32(temperature), jax.random.key(seed)
    )
    return bytes(np.asarray(added[0], np.uint8)).decode(errors="replace")
