"""Matrices that are nearly in the unit ball of the spectral norm: how nearly, and back into it."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spectral.matrix_functions import unit
from spectral.products import matmul, symmetric_product

_BLOCKS, _STEPS = 4, 2
_LONGEST = 1.3


def squared_norm(
    gram: Float[Array, "n n"], vector: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, " n"]]:
    """Largest eigenvalue of a Gram matrix B = A^T A where it is above 1, by a Chebyshev filter.

    T_k(2 B - I) leaves the eigenvalues in [0, 1], which are many, as they are, and lets those above 1 grow
    as cosh(k acosh(2 b - 1)): at b = 1.01, k = 36 does what 650 steps of power iteration do. It is applied
    as T_9(T_4), with T_4 formed.

    Args:
      gram: B.
      vector: where to start; the result of an earlier call is better than a random one. A fixed random one
        is tried beside it, since a vector that was leading may have become orthogonal to the one that is.

    Returns:
      A lower bound on the eigenvalue, close if it is above 1 (else some number up to 1), and its vector.
    """
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    fourth = 2 * gram - identity
    for _ in range(2):
        fourth = 2 * symmetric_product(fourth, fourth) - identity

    def block(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        previous, v = carry
        for _ in range(_STEPS):
            previous, v = v, 2 * matmul(v, fourth) - previous
        return scaled(previous, v)

    def scaled(previous: Array, v: Array) -> tuple[Array, Array]:
        # Eigenvalues far above 1 would overflow.
        size = jnp.max(jnp.abs(v), axis=1, keepdims=True)
        return previous / size, v / size

    v = jax.vmap(unit)(jnp.stack([vector, gaussian_like(vector, seed=1)]))
    _, v = jax.lax.fori_loop(0, _BLOCKS, block, scaled(v, matmul(v, fourth)))
    v = jax.vmap(unit)(v)
    squares = jnp.sum(v * matmul(v, gram), axis=1)
    larger = squares[1] > squares[0]
    return jnp.where(larger, squares[1], squares[0]), jnp.where(larger, v[1], v[0])


def reflection(gram: Float[Array, "n n"], square: Float[Array, ""]) -> Float[Array, "n n"]:
    """p(B) for a Gram matrix B = A^T A: A p(B) is A with the singular values above 1 reflected to below it.

    Dividing A by its norm shortens all of its directions for the sake of the longest; reflecting these, and
    then returning to a subspace that A came from, is the relaxed alternating projection between that subspace
    and the ball. p is of degree 4, by least squares for reflection on singular values up to 1.3, exact at 1;
    a longer A is taken as if it were as long.

    Args:
      gram: B.
      square: ||A||_2^2.

    Source: Gubin, Polyak, Raik, "The method of projections for finding the common point of convex sets",
    1967.
    """
    c = jnp.asarray(_reflection_coefficients(), gram.dtype)
    gram = gram / jnp.maximum(square / _LONGEST**2, 1)
    identity, squared = jnp.eye(len(gram), dtype=gram.dtype), symmetric_product(gram, gram)
    high = c[2] * identity + c[3] * gram + c[4] * squared
    return c[0] * identity + c[1] * gram + symmetric_product(squared, high)


@lru_cache
def _reflection_coefficients() -> np.ndarray:
    """Of 1, x, ..., x^4 in p, for x = s^2."""
    s = np.linspace(0, _LONGEST, 400)
    reflected = np.where(s > 1, 2 - s, s)
    # Most singular values are about 1; how the others come out matters little.
    weight = 0.1 + np.exp(-(((s - 1.05) / 0.1) ** 2))
    # p(x) = 1 + (x - 1) q(x).
    basis = s[:, None] * (s[:, None] ** 2 - 1) * s[:, None] ** (2 * np.arange(4))
    q, *_ = np.linalg.lstsq(weight[:, None] * basis, weight * (reflected - s), rcond=None)
    return np.append(-q, 0) + np.append(0, q) + np.eye(5)[0]


def into_ball(a: Float[Array, "m n"], vector: Float[Array, " n"]) -> Float[Array, "m n"]:
    """a divided by max(1, ||a||_2); `vector` is near its leading right singular vector."""
    square, _ = squared_norm(symmetric_product(a.mT, a), vector)
    return a / jnp.sqrt(jnp.maximum(square, 1))


def gaussian_like(vector: Float[Array, " n"], seed: int) -> Float[Array, " n"]:
    """A fixed Gaussian vector, orthogonal to none that matters: a constant one is to a centred G's rows."""
    # Drawn while tracing: a generator would be a tenth of the compiled program.
    return jnp.asarray(np.random.default_rng(seed).normal(size=vector.shape), vector.dtype) + 0 * vector
