"""The way back to orthonormal columns, at a price that follows the distance."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spectral.matrix_functions import polar_express_coefficients
from spectral.matrix_sign import gram_factor, msign, require_real_matrices
from spectral.products import matmul, symmetric_product

# Up to this departure the Gram matrix holds all the digits that a few steps on it need.
_GRAM_DEPARTURE = 0.5
_GRAM_STEPS = 3


@jax.jit
def polar_retraction(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """Polar factor X (X^T X)^{-1/2} of matrices whose columns are nearly orthonormal.

    With the departure E = X^T X - I, which a tangent step of size eta from orthonormal columns leaves at
    eta^2 A^T A, and its bound e = ||E^2||_F^{1/2} >= ||E||_2:

    - e <= 0.009 (in float32): X (I - E/2 + 3/8 E^2), whose departure is 5/8 E^3;
    - e <= 0.5: three Polar Express steps on the Gram matrix, then one product with X;
    - farther: `msign`, singular values below 1e-3 of the largest ending between 0 and 1.

    One Gram matrix and one product with X in the first two. The farthest matrix of a batch decides for all
    (under `vmap` every case is computed, and each matrix gets its own).

    Args:
      x: matrices, m >= n.

    Returns:
      The polar factors, in x's dtype; computed in float32 or better.

    Raises:
      ValueError: x is not a matrix, or wide.
      TypeError: x has integer entries.

    Source: Newton-Schulz of order 3; Higham, "Functions of Matrices", 2008, section 8.3.
    """
    require_real_matrices(x, "polar_retraction")
    m, n = x.shape[-2:]
    if m < n:
        raise ValueError(f"orthonormal columns need at least as many rows, got shape {x.shape}: transpose it")
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    identity = jnp.eye(n, dtype=work.dtype)
    departure = symmetric_product(work.mT, work) - identity
    square = symmetric_product(departure, departure)

    def near() -> Array:
        return work + matmul(work, 3 / 8 * square - departure / 2)

    def away() -> Array:
        # Singular values lie in [1 - e, 1 + e]^(1/2); rounding must not push them out of the polynomials'.
        largest = 1.01 * (1 + _GRAM_DEPARTURE)
        coefficients = polar_express_coefficients(_GRAM_STEPS, math.sqrt((1 - _GRAM_DEPARTURE) / largest))
        gram = (departure + identity) / largest
        gram_square = (square + 2 * departure + identity) / largest**2
        return matmul(work, gram_factor(gram, gram_square, coefficients) / math.sqrt(largest))

    def far() -> Array:
        return msign(work)

    bound = jnp.sqrt(jnp.linalg.norm(square, axis=(-2, -1)))
    # Negated, since comparisons with NaN are false: a departure that overflows is far.
    case = (~(bound <= _near_departure(work.dtype))).astype(int) + (~(bound <= _GRAM_DEPARTURE)).astype(int)
    return jax.lax.switch(jnp.max(case, initial=0), (near, away, far)).astype(x.dtype)


def _near_departure(dtype: jnp.dtype) -> float:
    """The departure whose remainder, 5/8 of its cube, is a few roundings."""
    return float(4 * jnp.finfo(dtype).eps / (5 / 8)) ** (1 / 3)
