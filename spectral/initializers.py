"""Initialisers with spectral norm sqrt(fan_out / fan_in), in the style of `jax.nn.initializers`."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from spectral.dimensions import KERNEL, DimensionNumbers, fans, from_matrices, to_matrices
from spectral.paths import map_named, match
from spectral.roles import Decision, Roles, decide
from spectral.rules import Role, gaussian_sigma, target_norm


class Initializer(Protocol):
    """What Flax's layers take: `jax.nn.initializers.Initializer`, but without `out_sharding`."""

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        """An array of this shape and dtype."""
        ...


def spectral_normal(
    gain: float = 1.0, dimension_numbers: MuonDimensionNumbers = KERNEL, simplified: bool = False
) -> Initializer:
    """Gaussian kernels of spectral norm about gain * sqrt(fan_out / fan_in).

    The expected norm is at most that, and within 3 % of it from 64 x 64 on.

    Args:
      gain: factor on the spectral norm.
      dimension_numbers: input and output axes; every other axis is a batch of matrices.
      simplified: Parametrization 1's sigma instead of the exact one (see `rules.gaussian_sigma`).

    Returns:
      An initialiser `(key, shape, dtype) -> array`.

    Source: arXiv:2310.17813, section 4.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        sigma = gain * gaussian_sigma(Role.MATRIX, *fans(shape, dimension_numbers), simplified=simplified)
        return sigma * jax.random.normal(key, shape, dtype)

    return init


def spectral_orthogonal(gain: float = 1.0, dimension_numbers: MuonDimensionNumbers = KERNEL) -> Initializer:
    """Semi-orthogonal kernels: every singular value is gain * sqrt(fan_out / fan_in).

    Args:
      gain: factor on the spectral norm.
      dimension_numbers: input and output axes; every other axis is a batch of matrices, drawn on
        their own.

    Returns:
      An initialiser `(key, shape, dtype) -> array`.

    Source: arXiv:2310.17813, section 4.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        fan_in, fan_out = fans(shape, dimension_numbers)
        count = math.prod(shape) // (fan_in * fan_out)
        work_dtype = jnp.promote_types(dtype, jnp.float32)
        matrices = jax.random.orthogonal(key, fan_in, (count,), work_dtype, m=fan_out)
        scaled = gain * target_norm(fan_in, fan_out) * matrices
        return from_matrices(scaled, shape, dimension_numbers).astype(dtype)

    return init


def embedding_normal(gain: float = 1.0) -> Initializer:
    """Embeddings with entries of standard deviation gain: rows of norm about gain * sqrt(features).

    One-hot inputs have norm 1, so Condition 1 holds with fan_in = 1 and is judged by the rows' norms.
    """
    return jax.nn.initializers.normal(gain * gaussian_sigma(Role.EMBEDDING, 1, 1))


def embedding_orthogonal(gain: float = 1.0) -> Initializer:
    """Embeddings whose rows, in uniformly random directions, all have norm gain * sqrt(features) exactly.

    The counterpart of `spectral_orthogonal` for one-hot inputs: as a matrix, V x d embeddings with V > d
    cannot have orthogonal rows.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        rows = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
        return (gain * math.sqrt(shape[-1]) * rows / norms).astype(dtype)

    return init


def reinitialize(
    params: Any,
    key: Array,
    *,
    kind: Literal["gaussian", "orthogonal"] = "gaussian",
    gain: float | Mapping[str, float] = 1.0,
    simplified: bool = False,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> Any:
    """Initial values for a whole tree of parameters, by their roles.

    Matrices and readouts get a spectral norm of gain * sqrt(fan_out / fan_in), embeddings rows of norm
    gain * sqrt(features), biases 0 and gains 1. A parameter's values depend on the key, its path and its
    shape only, not on what else is in the tree.

    Args:
      params: a pytree of arrays, or of their shapes, of any framework.
      key: a PRNG key.
      kind: `gaussian` (norms hold in expectation) or `orthogonal` (exactly, all singular values alike; for
        embeddings, rows of one norm).
      gain: factor on these norms, for all or by glob patterns on paths (1 where none fits).
      simplified: as in `spectral_normal`.
      roles, dimension_numbers, stacked: see `decide`.

    Returns:
      A tree like params, with their shapes and dtypes.

    Raises:
      ValueError: a parameter cannot be decided (see `decide`), a pattern fits none, `kind` is unknown, or
        `simplified` asks for another sigma of orthogonal matrices.

    Source: arXiv:2310.17813, section 4.
    """
    if kind not in ("gaussian", "orthogonal"):
        raise ValueError(f"unknown kind {kind!r}: choose gaussian or orthogonal")
    if simplified and kind == "orthogonal":
        raise ValueError("simplified is a choice of sigma, which orthogonal matrices do not have")
    decided = decide(params, roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)
    gains = (
        match(params, gain, "pattern of gain") if isinstance(gain, Mapping) else dict.fromkeys(decided, gain)
    )

    def initial(path: str, leaf: Any) -> Array:
        init = _initializer(decided[path], kind, gains.get(path, 1.0), simplified)
        own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return init(own_key, jnp.shape(leaf), jnp.result_type(leaf))

    return map_named(initial, params)


def _initializer(decision: Decision, kind: str, gain: float, simplified: bool) -> Initializer:
    role, dimension_numbers = decision.role, decision.dimension_numbers
    if role is Role.BIAS:
        return jax.nn.initializers.zeros
    if role is Role.GAIN:
        return jax.nn.initializers.ones
    if role is Role.EMBEDDING:
        return embedding_normal(gain) if kind == "gaussian" else _embedding_rows(gain, dimension_numbers)
    if kind == "orthogonal":
        return spectral_orthogonal(gain, dimension_numbers)
    return spectral_normal(gain, dimension_numbers, simplified)


def _embedding_rows(gain: float, dimension_numbers: MuonDimensionNumbers) -> Initializer:
    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        matrices = jax.eval_shape(
            lambda x: to_matrices(x, dimension_numbers), jax.ShapeDtypeStruct(shape, dtype)
        )
        rows = embedding_orthogonal(gain)(key, matrices.shape, dtype)
        return from_matrices(rows, shape, dimension_numbers)

    return init
