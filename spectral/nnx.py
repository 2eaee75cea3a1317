"""The coordinate check of a Flax NNX model: its parameters, and the output of every module."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array

from spectral.coordinate_check import by_module


def nnx_functions(
    model: nnx.Module, inputs: Callable[[Any], Any] = lambda batch: batch
) -> tuple[Any, Callable[[Any, Any], dict[str, Array]], Callable[[Any, Any], Any]]:
    """What `spectral.coordinate_check` asks of a model, as pure functions.

    Args:
      model: any NNX module. It is not changed; its other variables (statistics, say) stay as they are.
      inputs: batch -> the model's input; the batch itself if not given.

    Returns:
      `(params, features, apply)`, the `nnx.Param` state, (params, batch) -> path -> output of every module
      (the model's own is called `output`), and (params, inputs) -> the model's output, to make a loss of.
    """
    graph, params, *rest = nnx.split(model, nnx.Param, ...)

    def apply(params: Any, x: Any) -> Any:
        return nnx.merge(graph, params, *rest)(x)

    def features(params: Any, batch: Any) -> dict[str, Array]:
        merged = nnx.merge(graph, params, *rest)
        run = nnx.capture(merged, nnx.Intermediate, method_outputs=nnx.Intermediate)
        _, captured = run(inputs(batch))
        return by_module(nnx.to_pure_dict(captured))

    return params, features, apply
