"""Functions of the singular values of batched matrices: polynomials, decomposition, spectral norm."""

from functools import lru_cache, partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Coefficients = tuple[tuple[float, float, float], ...]


@lru_cache
def polar_express_coefficients(
    steps: int, lower: float = 1e-3, cushion: float = 0.02407327424182761, safety: float = 1.01
) -> Coefficients:
    """Coefficients of the Polar Express: the best composition of odd quintics for the matrix sign.

    Step by step, p(x) = a x + b x^3 + c x^5 is the minimax approximation of 1 on the interval
    [low, high] that holds the singular values, and the next interval is the image of this one. Where
    low < cushion * high the polynomial is made for [cushion * high, high] and centred anew, which keeps
    it from amplifying rounding errors; all but the last are shrunk by `safety` in their argument.

    Args:
      steps: number of polynomials.
      lower: smallest singular value, relative to the largest, that the composition is made for.
      cushion: smallest ratio low/high that a single polynomial is made for.
      safety: factor by which each polynomial's interval is widened.

    Returns:
      `steps` triples (a, b, c).

    Raises:
      ValueError: steps < 1, or `lower` is not in (0, 1].

    Source: Amsel, Persson, Musco, Gower, "The Polar Express", arXiv:2505.16932, Algorithm 1 and
    section 4.4.
    """
    require_steps(steps)
    if not 0 < lower <= 1:
        raise ValueError(f"lower must be in (0, 1], got {lower}")
    low, high = lower, 1.0
    coefficients = []
    for _ in range(steps):
        a, b, c = _minimax_quintic(max(low, cushion * high), high)
        ends = [x * (a + x**2 * (b + x**2 * c)) for x in (low, high)]
        centre = 2 / sum(ends)
        coefficients.append((a * centre, b * centre, c * centre))
        low = ends[0] * centre
        high = 2 - low
    shrunk = [(a / safety, b / safety**3, c / safety**5) for a, b, c in coefficients[:-1]]
    return (*shrunk, coefficients[-1])


def _minimax_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic closest to 1 on [low, high], by Remez exchange of its two inner extrema."""
    if low / high > 1 - 5e-6:  # the exchange becomes singular; this is its limit
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    error, previous = np.inf, None
    while previous is None or abs(previous - error) > 1e-15:
        previous = error
        x = np.array([low, *inner, high])
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, signs], axis=1), np.ones(4))
        # Extrema: a + 3 b t + 5 c t^2 = 0 with t = x^2.
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b**2 - 20 * a * c)) / (10 * c))
    return float(a), float(b), float(c)


@overload
def svd(x: Float[Array, "*batch m n"], compute_uv: Literal[True] = True) -> tuple[Array, Array, Array]: ...
@overload
def svd(x: Float[Array, "*batch m n"], compute_uv: Literal[False]) -> Float[Array, "*batch rank"]: ...
def svd(x: Float[Array, "*batch m n"], compute_uv: bool = True) -> tuple[Array, ...] | Array:
    """Thin singular value decompositions, safe to have several of in one program on a CPU.

    JAX's batched decomposition on a CPU waits, inside XLA's thread pool, for tasks that it gives to that
    pool: two at once on two cores can each hold a thread that the other waits for, and hang. One matrix at a
    time has nothing to wait for.

    Args:
      x: matrices.
      compute_uv: whether to give the singular vectors too.

    Returns:
      (u, s, vt), or s alone.
    """

    def batched(x: Array) -> tuple[Array, ...] | Array:
        result = jnp.linalg.svd(x, full_matrices=False, compute_uv=compute_uv)
        return tuple(result) if compute_uv else result

    def one_by_one(x: Array) -> tuple[Array, ...] | Array:
        results = jax.lax.map(batched, x.reshape(-1, *x.shape[-2:]))
        return jax.tree.map(lambda y: y.reshape(*x.shape[:-2], *y.shape[1:]), results)

    # A loop over an axis that an Explicit mesh shards is refused; its devices have a batch each.
    if x.ndim == 2 or any(axis is not None for axis in jax.typeof(x).sharding.spec):
        return batched(x)
    return jax.lax.platform_dependent(x, cpu=one_by_one, default=batched)


def spectral_norm(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
    """Largest singular value of every matrix, exactly (by SVD).

    Args:
      x: matrices.

    Returns:
      Their spectral norms, float32 or better. See `power_iteration` for the cheap estimate.
    """
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return svd(work, compute_uv=False)[..., 0]


@partial(jax.jit, static_argnames="iterations")
def power_iteration(
    x: Float[Array, "*batch m n"], v: Float[Array, "*batch n"] | None = None, iterations: int = 10
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch n"]]:
    """Spectral norm by power iteration on x^T x, a lower bound that grows with every iteration.

    The relative error falls like (s_2 / s_1)^(4 * iterations); on flat spectra that is slow, so keep
    `v` from one call to the next where x moves little.

    Args:
      x: matrices.
      v: starting vectors, of any norm; None starts from one fixed Gaussian vector, since a constant
        vector is orthogonal to the rows of a matrix that acts on centred inputs.
      iterations: multiplications by x^T x, at least 1.

    Returns:
      The estimates ||x v|| with ||v|| = 1, and v, the right singular vectors' estimates (a zero matrix
      gives 0 and a zero vector).
    """
    require_steps(iterations)
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    n = x.shape[-1]
    if v is None:
        # Made from x, so that over a mesh it is laid out like x.
        v = 0 * work[..., 0, :] + jax.random.normal(jax.random.key(0), (n,), work.dtype)
    v = jnp.broadcast_to(v, (*x.shape[:-2], n))

    def apply(matrix: Array, vector: Array) -> Array:
        return jnp.einsum("...ij,...j->...i", matrix, vector, precision=jax.lax.Precision.HIGHEST)

    def body(_: int, v: Array) -> Array:
        return unit(apply(work.mT, unit(apply(work, v))))

    v = jax.lax.fori_loop(0, iterations, body, unit(v.astype(work.dtype)))
    # x v is parallel to its own unit vector; the product of the two is its norm, without squares.
    xv = apply(work, v)
    return jnp.sum(unit(xv) * xv, axis=-1), v


def unit(x: Array, axis: int = -1) -> Array:
    """x divided by its 2-norm along an axis; zero vectors stay zero, at any scale and with no NaN."""
    # Dividing by the largest entry first keeps the squares from under- or overflowing.
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = jnp.linalg.norm(x, axis=axis, keepdims=True)
    return x / jnp.where(norm > 0, norm, 1)


def require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"at least one step is needed, got {steps}")
