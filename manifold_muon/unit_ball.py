"""The spectral norm of matrices that are nearly in the unit ball, cheaply and without decompositions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spectral.matrix_functions import unit
from spectral.products import matmul, symmetric_product

_BLOCKS, _STEPS = 4, 4


def squared_norm(
    gram: Float[Array, "n n"], vector: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, " n"]]:
    """Largest eigenvalue of a Gram matrix B = A^T A where it is above 1, by a Chebyshev filter.

    T_k(2 B - I) leaves the eigenvalues in [0, 1], which are many, as they are, and lets those above 1 grow
    as cosh(k acosh(2 b - 1)): at b = 1.01, k = 34 does what 700 steps of power iteration do. It is applied
    as T_17(T_2), with T_2 formed.

    Args:
      gram: B.
      vector: where to start; the result of an earlier call is better than a random one.

    Returns:
      A lower bound on the eigenvalue, close if it is above 1 (else some number up to 1), and its vector.
    """
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    shifted = 2 * gram - identity
    doubled = 2 * symmetric_product(shifted, shifted) - identity

    def block(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        previous, v = carry
        for _ in range(_STEPS):
            previous, v = v, 2 * matmul(v, doubled) - previous
        # Eigenvalues far above 1 would overflow.
        size = jnp.linalg.norm(v)
        return previous / size, v / size

    v = unit(vector)
    _, v = jax.lax.fori_loop(0, _BLOCKS, block, (v, matmul(v, doubled)))
    v = unit(v)
    return jnp.sum(v * matmul(v, gram)), v


def into_ball(a: Float[Array, "m n"], vector: Float[Array, " n"]) -> Float[Array, "m n"]:
    """a divided by max(1, ||a||_2); `vector` is near its leading right singular vector."""
    # Rounding may have turned the leading vector.
    starts = jnp.stack([vector, gaussian_like(vector, seed=1)])
    squares, _ = jax.vmap(partial(squared_norm, symmetric_product(a.mT, a)))(starts)
    return a / jnp.sqrt(jnp.maximum(jnp.max(squares), 1))


def gaussian_like(vector: Float[Array, " n"], seed: int) -> Float[Array, " n"]:
    """A fixed Gaussian vector, orthogonal to none that matters: a constant one is to a centred G's rows."""
    # Drawn while tracing: a generator would be a tenth of the compiled program.
    return jnp.asarray(np.random.default_rng(seed).normal(size=vector.shape), vector.dtype) + 0 * vector
