"""The coordinate check's features of a Flax Linen model: the output of every module."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from jaxtyping import Array

from spectral.coordinate_check import by_module


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
        return by_module(state["intermediates"])

    return features
