"""Which axes of an array are a matrix's inputs and outputs, and the array as a batch of matrices."""

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

DimensionNumbers = MuonDimensionNumbers | Mapping[str, MuonDimensionNumbers]
"""One specification for every matrix, or glob patterns on paths -> specification."""

# Flax kernels are (..., in, out). Optax's own default, (0, 1), takes a stack's layer axis for the inputs.
KERNEL = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def axes(
    shape: Sequence[int], dimension_numbers: MuonDimensionNumbers = KERNEL
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Batch, input and output axes of an array, each as non-negative numbers.

    Args:
      shape: of the array.
      dimension_numbers: optax's specification; axes that it does not name are batch axes.

    Returns:
      (batch axes, input axes, output axes).

    Raises:
      ValueError: an axis is out of range, named twice, or no axis is named on one side.
    """
    ndim = len(shape)
    sides = []
    for side in dimension_numbers:
        numbers = (side,) if isinstance(side, int) else tuple(side)
        if not numbers or any(not -ndim <= axis < ndim for axis in numbers):
            raise ValueError(f"{dimension_numbers} does not fit an array of shape {tuple(shape)}")
        sides.append(tuple(axis % ndim for axis in numbers))
    inputs, outputs = sides
    if len({*inputs, *outputs}) != len(inputs) + len(outputs):
        raise ValueError(f"{dimension_numbers} names an axis of shape {tuple(shape)} twice")
    batch = tuple(axis for axis in range(ndim) if axis not in inputs and axis not in outputs)
    return batch, inputs, outputs


def fans(shape: Sequence[int], dimension_numbers: MuonDimensionNumbers = KERNEL) -> tuple[int, int]:
    """(fan_in, fan_out) of one matrix of the array: the products of its input and of its output axes."""
    _, inputs, outputs = axes(shape, dimension_numbers)
    return math.prod(shape[i] for i in inputs), math.prod(shape[i] for i in outputs)


def to_matrices(
    x: Float[Array, "..."], dimension_numbers: MuonDimensionNumbers = KERNEL
) -> Float[Array, "batch fan_in fan_out"]:
    """The array as one batch of (fan_in, fan_out) matrices."""
    batch, inputs, outputs = axes(x.shape, dimension_numbers)
    return jnp.transpose(x, batch + inputs + outputs).reshape(-1, *fans(x.shape, dimension_numbers))


def from_matrices(
    matrices: Float[Array, "batch fan_in fan_out"],
    shape: Sequence[int],
    dimension_numbers: MuonDimensionNumbers = KERNEL,
) -> Float[Array, "..."]:
    """Inverse of `to_matrices` for an array of this shape.

    Raises:
      ValueError: the matrices are not those of such an array.
    """
    if matrices.shape[1:] != fans(shape, dimension_numbers) or matrices.size != math.prod(shape):
        raise ValueError(
            f"matrices of shape {matrices.shape} do not make up an array of shape {tuple(shape)}"
        )
    order = sum(axes(shape, dimension_numbers), ())
    transposed = matrices.reshape([shape[axis] for axis in order])
    return jnp.transpose(transposed, [order.index(axis) for axis in range(len(shape))])
