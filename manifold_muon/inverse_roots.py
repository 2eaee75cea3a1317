"""The inverse square root R = (M^T M + eps^2 I)^{-1/2}, and R X + X R = H, three ways.

`Eigh` decomposes the Gram matrix M^T M, on CPUs in float64. `Products` needs matrix products alone, which is
what GPUs and TPUs are fast at. `Svd` decomposes M itself: dearer by far, but squaring loses half of the
digits. All functions take one matrix; batches come by `vmap` or `lax.map`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spectral.matrix_functions import polar_express_coefficients
from spectral.products import matmul, symmetric_part, symmetric_product


class InverseRoot(NamedTuple):
    """R and what was found on the way to it."""

    root: Float[Array, "n n"]
    """R, damped."""
    nuclear: Float[Array, ""]
    """||M||_* = tr (M^T M)^{1/2}, not damped: exact, or a close upper bound."""
    direction_gram: Float[Array, "n n"]
    """A^T A for A = M R."""
    factors: tuple[Array, ...]
    """What `lyapunov` of the same backend needs."""


class Backend(Protocol):
    """One way from the Gram matrix to R."""

    @property
    def rounding(self) -> float:
        """What there is of it in a root, relative to the norm of the Gram matrix: the least eps^2."""
        ...

    def inverse_root(
        self, gram: Float[Array, "n n"], damping: Float[Array, ""], noise: Float[Array, ""]
    ) -> InverseRoot:
        """R of M^T M, with eps = `damping` times M's mean singular value (or half its RMS), but not below
        `noise`."""
        ...

    def lyapunov(self, factors: tuple[Array, ...], h: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """X of R X + X R = H, exactly or nearly; H is symmetric."""
        ...


# One matrix at a time: two batched LAPACK calls at once can hang XLA's CPU thread pool (see spectral.svd).
@jax.custom_batching.sequential_vmap
def _eigh_once(x: Array) -> tuple[Array, Array]:
    def in_float64(x: Array) -> tuple[Array, ...]:
        with jax.enable_x64(True):
            wide = jnp.linalg.eigh(x.astype(jnp.float64), symmetrize_input=False)
            return tuple(y.astype(x.dtype) for y in wide)

    def as_is(x: Array) -> tuple[Array, ...]:
        return tuple(jnp.linalg.eigh(x, symmetrize_input=False))

    # LAPACK's float32 is wrong by up to 2e-6 of the largest eigenvalue at n = 768, which is much beside
    # eps^2: directions' norms came out as up to 60. Float64 takes up to twice the time.
    return jax.lax.platform_dependent(x, cpu=in_float64, default=as_is)


@jax.custom_jvp
def _eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues in ascending order, and eigenvectors."""
    return _eigh_once(x)


@_eigh.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    # Apart from the decomposition, since a transposed program cannot go from float32 to float64 and back.
    values, vectors = _eigh(*primals)
    inner = matmul(vectors.mT, matmul(*tangents, vectors))
    apart = values - values[:, None]
    rotation = inner * jnp.where(apart == 0, 0, 1 / jnp.where(apart == 0, 1, apart))
    return (values, vectors), (jnp.diagonal(inner), matmul(vectors, rotation))


@jax.custom_batching.sequential_vmap
def _svd(x: Array) -> tuple[Array, Array, Array]:
    left, values, right = jnp.linalg.svd(x, full_matrices=False)
    return left, values, right


class _Spectral:
    """R and its Lyapunov equation from M's singular values and right singular vectors."""

    def _inverse_root(
        self, values: Array, vectors: Array, damping: Array, noise: Array | float
    ) -> InverseRoot:
        nuclear = jnp.sum(values)
        epsilon = jnp.maximum(damping * nuclear / len(values), noise)
        sigma = jnp.sqrt(values**2 + epsilon**2)
        root = symmetric_product(vectors / sigma, vectors.mT)
        # Not R M^T M R, in which rounding is amplified by 1 / eps^2.
        direction_gram = symmetric_product(vectors * (values / sigma) ** 2, vectors.mT)
        return InverseRoot(root, nuclear, direction_gram, (sigma, vectors))

    def lyapunov(self, factors: tuple[Array, ...], h: Float[Array, "n n"]) -> Float[Array, "n n"]:
        sigma, vectors = factors
        weights = sigma[:, None] * sigma / (sigma[:, None] + sigma)
        inner = weights * symmetric_product(vectors.mT, matmul(h, vectors))
        return symmetric_product(vectors, matmul(inner, vectors.mT))


@dataclass(frozen=True)
class Eigh(_Spectral):
    """By an eigendecomposition: exact to the rounding of the Gram matrix."""

    rounding: float = 5e-8

    def inverse_root(
        self, gram: Float[Array, "n n"], damping: Float[Array, ""], noise: Float[Array, ""]
    ) -> InverseRoot:
        values, vectors = _eigh(gram)
        return self._inverse_root(jnp.sqrt(jnp.maximum(values, 0)), vectors, damping, noise)


@dataclass(frozen=True)
class Svd(_Spectral):
    """By a singular value decomposition of M: exact to M's own rounding."""

    def direction(
        self, m: Float[Array, "m n"], damping: Float[Array, ""], noise: Float[Array, ""] | float
    ) -> tuple[Array, InverseRoot]:
        """A = M R and R."""
        left, values, right = _svd(m)
        inverse = self._inverse_root(values, right.mT, damping, noise)
        return matmul(left * (values / inverse.factors[0]), right), inverse

    def damped_sign(self, m: Float[Array, "m n"], factors: tuple[Array, ...]) -> Float[Array, "m n"]:
        """A of the same M again, damped as when these factors were found."""
        left, values, right = _svd(m)
        return matmul(left * (values / factors[0]), right)


@dataclass(frozen=True)
class Products:
    """By Polar Express polynomials of the Gram matrix, in n x n.

    With G_0 = (M^T M + eps^2 I) / top, the singular values of M Q_k go to 1 as in the full-space iteration:

        H_k = a I + b G_k + c G_k^2,  Q_{k+1} = Q_k H_k,  G_{k+1} = H_k G_k H_k

    The weights 1 / (r_i + r_j) of the Lyapunov equation are fitted by sums of products of the G_k and their
    squares, of low rank: X ~ sum_r F_r H F_r, within a third of the true weights on [lower, 1].
    """

    steps: int = 6
    lower: float = 2e-3
    """Smallest singular value, relative to the largest, that the polynomials are made for."""
    rank: int = 4
    rounding: float = 5e-7

    def inverse_root(
        self, gram: Float[Array, "n n"], damping: Float[Array, ""], noise: Float[Array, ""]
    ) -> InverseRoot:
        identity = jnp.eye(len(gram), dtype=gram.dtype) + 0 * gram
        epsilon = jnp.maximum(0.5 * damping * jnp.sqrt(jnp.trace(gram) / len(gram)), noise)
        shifted = gram + epsilon**2 * identity
        square = symmetric_product(shifted, shifted)
        # ||N^2||_F^{1/2} = (sum s^8)^{1/4} bounds the largest eigenvalue s^2 of N, within n^{1/4} of it.
        top = 1.01 * jnp.sqrt(jnp.linalg.norm(square))
        design = _design(self.steps, self.lower, self.rank)
        coefficients, weights = (jnp.asarray(x, gram.dtype) for x in design)

        def feature(total: Array, weight: Array, matrix: Array) -> Array:
            return total + weight[:, None, None] * matrix

        def polynomial(gram: Array, square: Array, triple: Array) -> Array:
            return triple[0] * identity + triple[1] * gram + triple[2] * square

        def step(carry: tuple[Array, Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple, None]:
            gram, product, factors = carry
            triple, weight = inputs
            square = symmetric_product(gram, gram)
            factors = feature(feature(factors, weight[0], gram), weight[1], square)
            h = polynomial(gram, square, triple)
            # All of these commute, so that their products are symmetric, but for rounding, which on steep
            # spectra would grow from step to step until the largest and the smallest directions are mixed.
            next_gram = symmetric_part(symmetric_product(symmetric_product(h, gram), h))
            return (next_gram, symmetric_part(symmetric_product(product, h)), factors), None

        factors = weights[0, 0][:, None, None] * identity
        carry = (shifted / top, identity, factors)
        (last, product, factors), _ = jax.lax.scan(step, carry, (coefficients[:-1], weights[1:-1]))
        square = symmetric_product(last, last)
        factors = feature(feature(factors, weights[-1, 0], last), weights[-1, 1], square)
        root = symmetric_part(symmetric_product(product, polynomial(last, square, coefficients[-1])))
        root = root / jnp.sqrt(top)
        nuclear, direction_gram = _nuclear(gram, root, epsilon)
        return InverseRoot(root, nuclear, direction_gram, (factors * jnp.sqrt(jnp.sqrt(top)),))

    def lyapunov(self, factors: tuple[Array, ...], h: Float[Array, "n n"]) -> Float[Array, "n n"]:
        (f,) = factors
        return jnp.sum(symmetric_product(matmul(f, h), f), axis=0)


def _nuclear(gram: Array, root: Array, epsilon: Array) -> tuple[Array, Array]:
    """An upper bound on tr (M^T M)^{1/2} from an R near (M^T M + eps^2 I)^{-1/2}, and R M^T M R.

    With x = s r for a singular value s: s (15 x - 10 x^3 + 3 x^5) / 8 is s to third order in 1 - x^2. Where
    x = s / sqrt(s^2 + eps^2) is far below 1 it lacks up to 0.165 eps (1 - x^2), which is added.
    """
    modulus = matmul(gram, root)  # s x: not symmetric where a large singular value magnifies the root's error
    unit = symmetric_product(root, modulus)  # x^2
    cubic, quintic = jnp.sum(modulus * unit), jnp.sum(modulus * symmetric_product(unit, unit))
    damped = jnp.maximum(len(gram) - jnp.trace(unit), 0)
    return (15 * jnp.trace(modulus) - 10 * cubic + 3 * quintic) / 8 + 0.165 * epsilon * damped, unit


@lru_cache
def _design(steps: int, lower: float, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Polynomial coefficients, and weights (steps + 1, 2, rank) of I, G_k and G_k^2 in each factor F_r.

    s t / (s + t), divided by sqrt(s t) so that all scales count alike, is projected on the span of the
    features (1, G_k, G_k^2)(s) times those of t; the projection's largest eigenvectors are the factors.
    """
    coefficients = polar_express_coefficients(steps, lower)
    s = np.geomspace(lower / 2, 1, 100)
    features, x = [np.ones_like(s), np.zeros_like(s)], s
    for a, b, c in coefficients:
        features += [x**2, x**4]
        x = x * (a + b * x**2 + c * x**4)
    scaled = np.stack(features, axis=1) / np.sqrt(s)[:, None]
    target = np.sqrt(s[:, None] * s) / (s[:, None] + s)
    left, size, right = np.linalg.svd(scaled, full_matrices=False)
    kept = size > 1e-3 * size[0]  # directions that would need large, cancelling weights
    left, back = left[:, kept], right[kept].T / size[kept]
    values, vectors = np.linalg.eigh(left.T @ target @ left)
    weights = back @ (vectors[:, -rank:] * np.sqrt(values[-rank:]))
    return np.asarray(coefficients), weights.reshape(steps + 1, 2, rank)
