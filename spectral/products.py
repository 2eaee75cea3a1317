"""Matrix products at the full precision of their dtype."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Below this size two smaller products cost more than the quarter of the FLOPs that they save.
_SPLIT_FROM = 256


def matmul(a: Float[Array, "*batch m k"], b: Float[Array, "*batch k n"]) -> Float[Array, "*batch m n"]:
    """The product a b at full precision.

    Args:
      a: matrices, real.
      b: matrices of the same dtype.

    Returns:
      a b, accumulated and given in a's dtype, or in float32 for narrower ones.
    """
    # A TPU's default float32 product rounds to bfloat16, and a GPU's may round to TF32. Products of
    # bfloat16 are exact as they are, up to their accumulation.
    precision = jax.lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    accumulate = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=accumulate)


def symmetric_product(
    a: Float[Array, "*batch n k"], b: Float[Array, "*batch k n"]
) -> Float[Array, "*batch n n"]:
    """The product a b where it is known to be symmetric, for three quarters of the FLOPs.

    Such are a Gram matrix X^T X, and the product of two symmetric matrices that commute, as polynomials of
    one matrix do. The upper half and the lower right quarter are computed,

        a b = [[P, Q], [Q^T, R]],   [P, Q] = a_1 b,   R = a_2 b_2,

    with a_1, a_2 the halves of a's rows and b_2 the second half of b's columns. Small matrices, where two
    products cost more than one, are multiplied as they are.

    Args:
      a: matrices, real.
      b: matrices of the same dtype and batch axes.

    Returns:
      a b, symmetric up to rounding, in a's dtype or float32 for narrower ones. Where a b is not symmetric
      its lower left quarter is wrong.

    Raises:
      ValueError: a b is not square.
    """
    n = a.shape[-2]
    if b.shape[-1] != n:
        raise ValueError(f"a symmetric product is square; got shapes {a.shape} and {b.shape}")
    if n < _SPLIT_FROM:
        return matmul(a, b)
    half = n // 2
    top = matmul(a[..., :half, :], b)
    corner = matmul(a[..., half:, :], b[..., :, half:])
    bottom = jnp.concatenate([top[..., :, half:].mT, corner], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def symmetric_part(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """(x + x^T) / 2: what is symmetric but for rounding, made so."""
    return (x + x.mT) / 2
