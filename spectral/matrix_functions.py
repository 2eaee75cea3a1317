"""Matrix sign (polar factor) and spectral norm of batched, square or rectangular matrices."""

from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Method = Literal["polar_express", "muon", "svd"]
Coefficients = tuple[tuple[float, float, float], ...]

_MUON_QUINTIC = (3.4445, -4.7750, 2.0315)
_DEFAULT_STEPS = {"polar_express": 10, "muon": 5}
# Frobenius normalisation leaves the largest singular value at or below 1 / _MARGIN, so that rounding
# cannot push it out of the interval on which the polynomials were made.
_MARGIN = 1.01


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
    _require_steps(steps)
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


@partial(jax.jit, static_argnames=("method", "steps", "dtype"))
def msign(
    x: Float[Array, "*batch m n"],
    method: Method = "polar_express",
    steps: int | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """Matrix sign of a rectangular matrix, its orthogonal polar factor: U V^T for x = U diag(s) V^T.

    The polynomial methods iterate X <- X (a I + b X^T X + c (X^T X)^2) from X = x / ||x||_F, on the
    smaller side's Gram matrix. They do not depend on the scale of x. Singular values of zero stay at
    zero; those far below 1e-3 of ||x||_F may end between 0 and 1.

    Args:
      x: matrices; every one in the batch is treated on its own.
      method: `polar_express` (converges to 1), `muon` (the constant quintic 3.4445, -4.7750, 2.0315:
        fast, with singular values left between 0.68 and 1.20), or `svd` (exact, and slow on accelerators;
        singular values below max(m, n) * eps * s_max count as zero).
      steps: number of polynomial steps; None is 10 for `polar_express` and 5 for `muon`.
      dtype: dtype of the products, accumulated in float32; None is float32 (float64 for float64 input)
        at full precision.

    Returns:
      The polar factors, in x's shape and dtype.

    Raises:
      ValueError: x is not a matrix, the method is unknown, or steps < 1.
      TypeError: x has integer entries.

    Sources: Jordan et al., "Muon", 2024; Amsel et al., arXiv:2505.16932.
    """
    if x.ndim < 2:
        raise ValueError(f"msign needs matrices, with at least 2 axes; got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"msign needs real floating-point entries; got {x.dtype}: cast them first")
    steps = _DEFAULT_STEPS.get(method) if steps is None else steps
    if steps is not None:
        _require_steps(steps)
    if method == "svd":
        return _msign_svd(x)
    if method == "polar_express":
        coefficients, margin = polar_express_coefficients(steps), _MARGIN
    elif method == "muon":
        coefficients, margin = (_MUON_QUINTIC,) * steps, 1.0
    else:
        raise ValueError(f"unknown msign method {method!r}: choose polar_express, muon or svd")
    wide = x.shape[-2] < x.shape[-1]
    y = _normalize(x.mT if wide else x, margin)
    # float32 products at full precision: a TPU's default would round them to bfloat16. Products of
    # bfloat16 are what the caller asked for, and exact up to their float32 accumulation.
    work_dtype = y.dtype if dtype is None else jnp.dtype(dtype)
    precision = jax.lax.Precision.DEFAULT if work_dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    y = y.astype(work_dtype)

    def step(y: Array, triple: Array) -> tuple[Array, None]:
        a, b, c = triple
        gram = _matmul(y.mT, y, precision)
        return a * y + _matmul(y, b * gram + c * _matmul(gram, gram, precision), precision), None

    y, _ = jax.lax.scan(step, y, jnp.asarray(coefficients, work_dtype))
    return (y.mT if wide else y).astype(x.dtype)


def _matmul(a: Array, b: Array, precision: jax.lax.Precision) -> Array:
    accumulate = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=accumulate).astype(a.dtype)


def _normalize(x: Array, margin: float) -> Array:
    """x divided by margin * ||x||_F, in float32 or better; zero matrices stay zero at no NaN."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Dividing by the largest entry first keeps the squares from under- or overflowing.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    return x / jnp.where(norm > 0, margin * norm, 1)


def _msign_svd(x: Array) -> Array:
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    u, s, vt = svd(work)
    threshold = s[..., :1] * max(x.shape[-2:]) * jnp.finfo(work.dtype).eps
    sign = jnp.where(s > threshold, 1.0, 0.0).astype(work.dtype)
    return _matmul(u * sign[..., None, :], vt, jax.lax.Precision.HIGHEST).astype(x.dtype)


def svd(x: Float[Array, "*batch m n"], compute_uv: bool = True) -> tuple[Array, Array, Array] | Array:
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
    _require_steps(iterations)
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


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"at least one step is needed, got {steps}")
