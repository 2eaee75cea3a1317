"""Matrix sign (orthogonal polar factor) of batched, square or rectangular matrices."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spectral.matrix_functions import Coefficients, polar_express_coefficients, require_steps, svd
from spectral.products import matmul, symmetric_product

Method = Literal["polar_express", "muon", "svd"]

_MUON_QUINTIC = (3.4445, -4.7750, 2.0315)
# Smallest singular values, relative to the largest, that so many Polar Express steps bring within 1 % of 1;
# 8 steps bring the last of them within 1e-7, and 9 within 1e-15.
_LOWER = {1: 0.7, 2: 0.2, 3: 0.06, 4: 0.015, 5: 4e-3, 6: 1e-3}
_LEAST_LOWER = 3e-4
# The largest singular value stays at or below 1 / _MARGIN, so that rounding cannot push it out of the
# interval on which the polynomials were made.
_MARGIN = 1.01
# Full space costs two products with x a step; the Gram matrix costs them once a phase, but three products
# of its own size a step more (see _through_gram). They break even at m/n = 9/7, and 3/2 for small matrices,
# whose symmetric products save nothing.
_GRAM_FROM = 1.5
# A Gram matrix knows its eigenvalues to 1e-7 of the largest, and a phase amplifies them by at most the square
# of this: errors stay small, and eigenvalues that rounding made negative stay close to zero (further down the
# polynomials diverge).
_LARGEST_AMPLIFICATION = 64.0


@partial(jax.jit, static_argnames=("method", "steps", "dtype"))
def msign(
    x: Float[Array, "*batch m n"],
    method: Method = "polar_express",
    steps: int | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """Matrix sign of a rectangular matrix, its orthogonal polar factor: U V^T for x = U diag(s) V^T.

    The polynomial methods iterate X <- X H, H = a I + b X^T X + c (X^T X)^2, on the smaller side's Gram
    matrix. Square matrices and products in bfloat16 take the steps as they stand. Where one side is at least
    1.5 times the other, the H of two or three steps are multiplied in Gram space before X is. They do not
    depend on the scale of x. Singular values of zero stay at zero.

    Args:
      x: matrices; every one in the batch is treated on its own.
      method: `polar_express` (converges to 1), `muon` (the constant quintic 3.4445, -4.7750, 2.0315, from
        x / ||x||_F: fast, with singular values left between 0.68 and 1.20), or `svd` (exact, and slow on
        accelerators; singular values below max(m, n) * eps * s_max count as zero).
      steps: number of polynomial steps; None is 8 for `polar_express` (9 in float64) and 5 for `muon`. With
        8, the singular values down to 1e-3 of the largest end within 1e-4 of 1, and smaller ones between 0
        and 1. Muon's direction needs fewer: 5 reach 0.99 of the largest <x, A>, ||A||_2 <= 1, where singular
        values below 4e-3 of the largest hold little of it, and 6 the same for 1e-3.
      dtype: dtype of the products' operands; None is float32 (float64 for float64 input) at full precision.
        Of bfloat16 ones, accumulated in float32, singular values end within 1e-2 of 1.

    Returns:
      The polar factors, in x's shape and dtype.

    Raises:
      ValueError: x is not a matrix, the method is unknown, or steps < 1.
      TypeError: x has integer entries.

    Sources: Jordan et al., "Muon", 2024; Amsel et al., arXiv:2505.16932.
    """
    require_real_matrices(x, "msign")
    if steps is not None:
        require_steps(steps)
    if method == "svd":
        return _msign_svd(x)
    if method == "polar_express":
        steps = steps or (9 if x.dtype == jnp.float64 else 8)
        coefficients = polar_express_coefficients(steps, _LOWER.get(steps, _LEAST_LOWER))
    elif method == "muon":
        coefficients = (_MUON_QUINTIC,) * (steps or 5)
    else:
        raise ValueError(f"unknown msign method {method!r}: choose polar_express, muon or svd")
    wide = x.shape[-2] < x.shape[-1]
    y = _over_frobenius_norm(x.mT if wide else x)
    work_dtype = y.dtype if dtype is None else jnp.dtype(dtype)
    y = y.astype(work_dtype)
    gram = symmetric_product(y.mT, y)
    square = symmetric_product(gram.astype(work_dtype), gram.astype(work_dtype))
    if method == "polar_express":
        y, gram, square = _over_schatten_norm(y, gram, square)
    # A Gram matrix rounded to bfloat16 would hide singular values below 6 % of the largest.
    in_gram_space = y.shape[-2] >= _GRAM_FROM * y.shape[-1] and work_dtype != jnp.bfloat16
    iterate = _through_gram if in_gram_space else _in_full_space
    y = iterate(y, gram, square, coefficients)
    return (y.mT if wide else y).astype(x.dtype)


def require_real_matrices(x: Array, name: str) -> None:
    """ValueError or TypeError, in the name of the function that needs them."""
    if x.ndim < 2:
        raise ValueError(f"{name} needs matrices, with at least 2 axes; got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} needs real floating-point entries; got {x.dtype}: cast them first")


def _over_frobenius_norm(x: Array) -> Array:
    """x divided by ||x||_F, in float32 or better; zero matrices stay zero at no NaN."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Dividing by the largest entry first keeps the squares from under- or overflowing.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = _frobenius_norm(x)
    return x / jnp.where(norm > 0, norm, 1)


def _over_schatten_norm(y: Array, gram: Array, square: Array) -> tuple[Array, Array, Array]:
    """All three for y divided by its Schatten 8-norm ||(y^T y)^2||_F^(1/4) and the margin.

    It bounds the largest singular value like the Frobenius norm, by at most n^(1/8) too much instead of
    n^(1/2), and `square` is at hand.
    """
    norm = _frobenius_norm(square)
    scale = 1 / (_MARGIN**2 * jnp.sqrt(jnp.where(norm > 0, norm, 1)))
    return (y * jnp.sqrt(scale)).astype(y.dtype), gram * scale, square * scale**2


def _in_full_space(y: Array, gram: Array, square: Array, coefficients: Coefficients) -> Array:
    """One y <- y H after another, with H = s I + F, s = a + b + c: at the end F is small.

    Rounding F then costs little, and the two terms, whose y a compiler may round differently, do not amplify
    the difference.
    """
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)

    def factor(gram: Array, square: Array, triple: Array) -> tuple[Array, Array]:
        a, b, c = triple
        return a + b + c, b * gram + c * square - (b + c) * identity

    def apply(y: Array, s: Array, f: Array) -> Array:
        return (s * y + matmul(y, f.astype(y.dtype))).astype(y.dtype)

    def step(carry: tuple[Array, Array, Array], triple: Array) -> tuple[tuple[Array, Array, Array], None]:
        y = apply(*carry)
        gram = symmetric_product(y.mT, y)
        departure = (gram - identity).astype(y.dtype)
        square = symmetric_product(departure, departure) + 2 * gram - identity
        return (y, *factor(gram, square, triple)), None

    triples = jnp.asarray(coefficients, gram.dtype)
    # A scan: of unrolled steps XLA computes some iterates twice, with different rounding.
    carry, _ = jax.lax.scan(step, (y, *factor(gram, square, triples[0])), triples[1:])
    return apply(*carry)


def _through_gram(y: Array, gram: Array, square: Array, coefficients: Coefficients) -> Array:
    """y times the product of the steps' factors, which is made from the Gram matrix alone.

    In a few phases, each with a Gram matrix of its own: it holds squares of singular values, and so only half
    of the digits. The first phase raises small singular values into the next Gram matrix's reach. With
    symmetric products a phase of k steps on (m, n) costs 3.5 m n^2 + 1.5 (4 k - 3) n^3 FLOPs / 2, and k steps
    in full space 3.5 k m n^2 + 1.5 k n^3.
    """
    for index, phase in enumerate(_phases(coefficients)):
        if index > 0:
            gram = symmetric_product(y.mT, y)
            square = symmetric_product(gram, gram)
        y = matmul(y, gram_factor(gram, square, phase))
    return y


def gram_factor(gram: Array, square: Array, coefficients: Coefficients) -> Array:
    """Q with X Q the composed odd polynomials of X, from X^T X.

    From G = X^T X and Q = I, step by step: H = a I + b G + c G^2, Q <- Q H, G <- H G H.

    Args:
      gram: X^T X.
      square: its square.
      coefficients: of the polynomials, in order.

    Returns:
      Q, symmetric.
    """
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)

    def factor(gram: Array, square: Array, triple: Array) -> Array:
        a, b, c = triple
        return a * identity + b * gram + c * square

    def step(carry: tuple[Array, Array, Array], triple: Array) -> tuple[tuple[Array, Array, Array], None]:
        gram, h, q = carry
        gram = symmetric_product(symmetric_product(gram, h), h)
        h = factor(gram, symmetric_product(gram, gram), triple)
        return (gram, h, symmetric_product(q, h)), None

    triples = jnp.asarray(coefficients, gram.dtype)
    first = factor(gram, square, triples[0])
    (_, _, q), _ = jax.lax.scan(step, (gram, first, first), triples[1:])
    return q


def _phases(coefficients: Coefficients) -> list[Coefficients]:
    """The steps in groups that amplify no singular value by more than _LARGEST_AMPLIFICATION."""
    phases: list[Coefficients] = []
    amplification = float("inf")
    for triple in coefficients:
        amplification *= triple[0]
        if amplification > _LARGEST_AMPLIFICATION:
            phases.append(())
            amplification = triple[0]
        phases[-1] = (*phases[-1], triple)
    return phases


def _msign_svd(x: Array) -> Array:
    work = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    u, s, vt = svd(work)
    threshold = s[..., :1] * max(x.shape[-2:]) * jnp.finfo(work.dtype).eps
    sign = jnp.where(s > threshold, 1.0, 0.0).astype(work.dtype)
    return matmul(u * sign[..., None, :], vt).astype(x.dtype)


def _frobenius_norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
