"""Spectral norms of weights and updates against their targets, and how layer inputs lie to the weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from spectral.dimensions import KERNEL, DimensionNumbers, fans, to_matrices
from spectral.matrix_functions import power_iteration, spectral_norm, svd
from spectral.paths import named_leaves
from spectral.products import matmul
from spectral.rules import target_norm
from spectral.selection import Where, select_matrices


def norm_ratios(
    tree: Any,
    where: Where,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    embeddings: Where = (),
    iterations: int | None = None,
) -> dict[str, Float[Array, "batch"]]:
    """Spectral norms over sqrt(fan_out / fan_in), of weights or of updates; also under `jit`.

    Args:
      tree: params of any framework, or updates.
      where: glob patterns on the paths of the matrices.
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes.
      embeddings: glob patterns on the paths of the embeddings, of shape (..., rows, features). Inputs are
        one-hot there: their largest row's norm over sqrt(features) is given.
      iterations: of power iteration; None decomposes every matrix, which is exact and slow for large ones.

    Returns:
      path -> one ratio for each matrix of a stack; Condition 1 holds where they are about 1.

    Raises:
      ValueError, TypeError: the patterns do not fit (see `select_matrices`).

    Source: arXiv:2310.17813, Condition 1.
    """
    leaves = dict(named_leaves(tree))
    ratios = {}
    for name, spec in select_matrices(tree, where, dimension_numbers).items():
        matrices = to_matrices(leaves[name], spec)
        norms = (
            spectral_norm(matrices) if iterations is None else power_iteration(matrices, None, iterations)[0]
        )
        ratios[name] = norms / target_norm(*fans(leaves[name].shape, spec))
    for name in select_matrices(tree, embeddings):
        rows = leaves[name].astype(jnp.promote_types(leaves[name].dtype, jnp.float32))
        largest = jnp.max(jnp.linalg.norm(rows, axis=-1), axis=-1)
        ratios[name] = largest.reshape(-1) / target_norm(1, rows.shape[-1])
    return ratios


@dataclass(frozen=True)
class Condition:
    """Of one parameter: the largest norm over its matrices. NaN for the update's if none was given."""

    path: str
    shape: tuple[int, ...]
    target: float
    norm: float
    ratio: float
    update_norm: float
    update_ratio: float


@dataclass(frozen=True)
class ConditionReport:
    """Rows, one a parameter, and a table of them when printed."""

    rows: tuple[Condition, ...]

    def __str__(self) -> str:
        header = ("path", "shape", "target", "norm", "ratio", "update", "ratio")
        numbers = [
            [f"{x:.4g}" for x in (r.target, r.norm, r.ratio, r.update_norm, r.update_ratio)]
            for r in self.rows
        ]
        cells = [header, *((r.path, str(r.shape), *n) for r, n in zip(self.rows, numbers, strict=True))]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(left + right))
        return "\n".join(lines)


def condition_report(
    params: Any,
    updates: Any = None,
    *,
    previous: Any = None,
    where: Where = "*kernel",
    dimension_numbers: DimensionNumbers = KERNEL,
    embeddings: Where = (),
    iterations: int | None = None,
) -> ConditionReport:
    """How closely a model and its updates keep Condition 1, matrix by matrix.

    Args:
      params: of any framework.
      updates: like params: what was or will be added to them, learning rate and all.
      previous: instead of updates, the params before them.
      where, dimension_numbers, embeddings, iterations: see `norm_ratios`.

    Returns:
      A report, to `print` or to read rows of. For embeddings, the norms are those of the largest rows.

    Raises:
      ValueError: both updates and previous are given, or the patterns do not fit.

    Source: arXiv:2310.17813, Condition 1.
    """
    if updates is not None and previous is not None:
        raise ValueError("pass updates, or the previous params, not both")
    if previous is not None:
        updates = jax.tree.map(jnp.subtract, params, previous)
    ratios_of = partial(
        norm_ratios,
        where=where,
        dimension_numbers=dimension_numbers,
        embeddings=embeddings,
        iterations=iterations,
    )
    ratios = ratios_of(params)
    moved = {} if updates is None else ratios_of(updates)
    dimensions = select_matrices(params, where, dimension_numbers)
    rows = []
    for name, leaf in named_leaves(params):
        if name not in ratios:
            continue
        shape = tuple(jnp.shape(leaf))
        target = target_norm(*(fans(shape, dimensions[name]) if name in dimensions else (1, shape[-1])))
        ratio = float(np.max(ratios[name]))
        update = float(np.max(moved[name])) if name in moved else float("nan")
        rows.append(Condition(name, shape, target, ratio * target, ratio, update * target, update))
    return ConditionReport(tuple(rows))


def alignment(
    kernel: Float[Array, "..."],
    inputs: Float[Array, "*samples fan_in"],
    dimension_numbers: MuonDimensionNumbers = KERNEL,
) -> Float[Array, "*samples"]:
    """||W x|| / (||W||_2 ||x||) of every input: 1 where it lies along the first right singular vector.

    Args:
      kernel: one matrix, W^T; use `jax.vmap` for stacks.
      inputs: of the layer; several input axes are flattened to one.
      dimension_numbers: input and output axes.

    Returns:
      One number an input, 0 for zero inputs. A random input gives about ||W||_F / (||W||_2 sqrt(fan_in)).

    Raises:
      ValueError: the kernel is a stack, or the inputs do not fit it.

    Source: arXiv:2310.17813, section 2.
    """
    matrix, inputs = _layer(kernel, inputs, dimension_numbers)
    outputs = matmul(inputs, matrix)
    bound = spectral_norm(matrix) * jnp.linalg.norm(inputs, axis=-1)
    return jnp.linalg.norm(outputs, axis=-1) / jnp.where(bound == 0, 1, bound)


def null_space_share(
    kernel: Float[Array, "..."],
    inputs: Float[Array, "*samples fan_in"],
    dimension_numbers: MuonDimensionNumbers = KERNEL,
    rtol: float | None = None,
) -> Float[Array, "*samples"]:
    """||P x||^2 / ||x||^2 of every input, with P on the null space of W: what the layer cannot see.

    Where fan_in > fan_out it is 1 - fan_out / fan_in for random inputs, as at initialisation.

    Args:
      kernel, inputs, dimension_numbers: see `alignment`.
      rtol: singular values up to rtol times the largest count as zero; None is their rounding errors.

    Returns:
      One number an input, from 0 to 1; 0 for zero inputs.

    Raises:
      ValueError: see `alignment`.
    """
    matrix, inputs = _layer(kernel, inputs, dimension_numbers)
    u, s, _ = svd(matrix)
    if rtol is None:
        rtol = max(matrix.shape) * float(jnp.finfo(s.dtype).eps)
    basis = jnp.where(s > rtol * s[0], u, 0)
    # The rest itself, whose square does not cancel where it is small.
    rest = inputs - matmul(matmul(inputs, basis), basis.T)
    return _square(rest) / _nonzero(_square(inputs))


def singular_shares(
    kernel: Float[Array, "..."],
    inputs: Float[Array, "*samples fan_in"],
    dimension_numbers: MuonDimensionNumbers = KERNEL,
) -> Float[Array, "rank"]:
    """Shares of the inputs' squared norm along each right singular vector of W, largest value first.

    Args:
      kernel, inputs, dimension_numbers: see `alignment`.

    Returns:
      min(fan_in, fan_out) numbers, over all inputs together, which sum to 1 less the share in the null
      space; 1 / fan_in each for random inputs.

    Raises:
      ValueError: see `alignment`.
    """
    matrix, inputs = _layer(kernel, inputs, dimension_numbers)
    along = matmul(inputs, svd(matrix)[0]).reshape(-1, min(matrix.shape))
    return jnp.sum(along * along, axis=0) / _nonzero(jnp.sum(inputs * inputs))


def _layer(kernel: Array, inputs: Array, dimension_numbers: MuonDimensionNumbers) -> tuple[Array, Array]:
    """The kernel as (fan_in, fan_out) and the inputs as (*samples, fan_in), in float32 or better."""
    matrices = to_matrices(kernel, dimension_numbers)
    if len(matrices) != 1:
        raise ValueError(f"{kernel.shape} is a stack of {len(matrices)} matrices: use jax.vmap over it")
    fan_in = matrices.shape[1]
    sides = dimension_numbers.reduction_axis
    count = 1 if isinstance(sides, int) else len(sides)
    samples, features = inputs.shape[: inputs.ndim - count], inputs.shape[inputs.ndim - count :]
    if inputs.ndim < count or int(np.prod(features)) != fan_in:
        raise ValueError(f"inputs of shape {inputs.shape} do not fit a kernel with fan_in {fan_in}")
    dtype = jnp.promote_types(jnp.promote_types(kernel.dtype, inputs.dtype), jnp.float32)
    return matrices[0].astype(dtype), inputs.reshape(*samples, fan_in).astype(dtype)


def _square(x: Array) -> Array:
    return jnp.sum(x * x, axis=-1)


def _nonzero(x: Array) -> Array:
    return jnp.where(x == 0, 1, x)
