"""The coordinate check's features of a Flax Linen model: the output of every module."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array


def linen_features(
    model: nn.Module, inputs: Callable[[Any], Any] = lambda batch: batch, **kwargs: Any
) -> Callable[[Any, Any], dict[str, Array]]:
    """`features` for `spectral.coordinate_check`: what every module of the model returns.

    Args:
      model: any Linen module.
      inputs: batch -> the model's input; the batch itself if not given.
      **kwargs: passed on to the model's `__call__`.

    Returns:
      (variables, batch) -> path -> output, like `Dense_0`; the model's own is called `output`. The variables
      are what `model.init` returns, `{"params": ...}`.
    """

    def features(variables: Any, batch: Any) -> dict[str, Array]:
        _, state = model.apply(
            variables, inputs(batch), **kwargs, capture_intermediates=True, mutable=["intermediates"]
        )
        found = {}
        for path, x in jax.tree_util.tree_leaves_with_path(state["intermediates"]):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            # A tuple of one output a call: `Dense_0/__call__/0`.
            name = name.removesuffix("/0").removesuffix("__call__").removesuffix("/")
            found[name or "output"] = x
        return found

    return features
