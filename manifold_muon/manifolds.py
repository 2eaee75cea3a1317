"""Matrix manifolds for weights W (m, n) with m >= n rows: what their constraint is and the way back to it.

Every method takes a batch of matrices (..., m, n) in the papers' orientation: tall, columns constrained.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from spectral import polar_retraction, target_norm
from spectral.matrix_functions import svd, unit
from spectral.products import matmul, symmetric_product

Radius = float | Literal["spectral"]
Tall = Float[Array, "*batch m n"]
Symmetric = Float[Array, "*batch n n"]


class Manifold(ABC):
    """A set of matrices given by linear conditions on the Gram matrix W^T W.

    Write one of your own as a frozen dataclass: it is compared and hashed by value, as a static argument of
    jit. Its tangent directions A at W are those with P(A^T W + W^T A) = 0, for a self-adjoint projector P on
    symmetric matrices.
    """

    @abstractmethod
    def project_symmetric(self, symmetric: Symmetric) -> Symmetric:
        """P: the part of a symmetric (n, n) matrix that the constraint sees."""

    @abstractmethod
    def retract(self, w: Tall) -> Tall:
        """The manifold's point next to w, a point that a step took off it."""

    def project(self, w: Tall) -> Tall:
        """The manifold's point next to any w, near or far, rank-deficient or zero; dearer than `retract`."""
        return self.retract(w)

    @abstractmethod
    def violation(self, w: Tall) -> Float[Array, "*batch"]:
        """How far w is from the manifold: ||H||_F / n of the constraint's residual H, relative to the
        columns' norms."""

    def scale(self, fan_in: int, fan_out: int) -> float:
        """Factor on the unit-norm update: the radius, for a kernel with these fans."""
        del fan_in, fan_out
        return 1.0

    def with_radius(self, radius: float) -> Self:
        """This manifold at another radius (itself, where there is none)."""
        del radius
        return self


@dataclass(frozen=True)
class _WithRadius(Manifold):
    radius: Radius = 1.0
    """Columns' norm; `spectral` is sqrt(fan_out / fan_in), which keeps Condition 1 of arXiv:2310.17813."""

    def __post_init__(self) -> None:
        if not _is_positive(self.radius) and self.radius != "spectral":
            raise ValueError(f"radius must be a positive number or 'spectral', got {self.radius!r}")

    def scale(self, fan_in: int, fan_out: int) -> float:
        return target_norm(fan_in, fan_out) if self.radius == "spectral" else float(self.radius)

    def with_radius(self, radius: float) -> Self:
        return replace(self, radius=radius)

    def _number(self) -> float:
        if self.radius == "spectral":
            raise ValueError(
                "radius='spectral' depends on fan_in and fan_out, which a bare matrix does not tell: "
                "use with_radius(sqrt(fan_out / fan_in))"
            )
        return float(self.radius)


@dataclass(frozen=True)
class Unconstrained(_WithRadius):
    """All matrices: no constraint, so the step is plain Muon's; `radius` is its spectral norm."""

    def project_symmetric(self, symmetric: Symmetric) -> Symmetric:
        return jnp.zeros_like(symmetric)

    def retract(self, w: Tall) -> Tall:
        return w

    def violation(self, w: Tall) -> Float[Array, "*batch"]:
        return jnp.zeros(w.shape[:-2], w.dtype)


@dataclass(frozen=True)
class Stiefel(_WithRadius):
    """Orthogonal columns of norm `radius`: W^T W = radius^2 I, so every singular value is the radius."""

    def project_symmetric(self, symmetric: Symmetric) -> Symmetric:
        return symmetric

    def retract(self, w: Tall) -> Tall:
        """The polar factor W (W^T W)^{-1/2} times the radius: the nearest point."""
        return self._number() * polar_retraction(w / self._number())

    def project(self, w: Tall) -> Tall:
        return self._number() * _polar_frame(w)

    def violation(self, w: Tall) -> Float[Array, "*batch"]:
        n = w.shape[-1]
        return _rms(_gram(w / self._number()) - jnp.eye(n, dtype=w.dtype))


@dataclass(frozen=True)
class DGram(Manifold):
    """Orthogonal columns of any norm: the off-diagonal part of W^T W is zero."""

    retraction: Literal["frame", "svd"] = "frame"
    """`frame`: the polar frame Q of the normalised columns, with the least-squares scales <q_j, w_j>;
    leaves points of the manifold where they are. `svd`: the reference's U V^T diag(s), which lays sorted
    singular values on columns that they do not belong to."""
    max_scale: float | None = None
    """Largest norm of a column, and so largest singular value of W; None is no limit. Tangent steps do not
    know of it: one may lengthen a column past the limit, and `retract` cuts it back."""

    def __post_init__(self) -> None:
        if self.retraction not in ("frame", "svd"):
            raise ValueError(f"unknown retraction {self.retraction!r}: choose frame or svd")
        if self.max_scale is not None and not _is_positive(self.max_scale):
            raise ValueError(f"max_scale must be a positive number or None, got {self.max_scale!r}")

    def project_symmetric(self, symmetric: Symmetric) -> Symmetric:
        return symmetric * (1 - jnp.eye(symmetric.shape[-1], dtype=symmetric.dtype))

    def retract(self, w: Tall) -> Tall:
        if self.retraction == "svd":
            u, s, vt = svd(w)
            return matmul(u, vt) * self._limit(s[..., None, :])
        return self._scale_columns(polar_retraction(unit(w, axis=-2)), w)

    def project(self, w: Tall) -> Tall:
        if self.retraction == "svd":
            return self.retract(w)
        return self._scale_columns(_polar_frame(unit(w, axis=-2)), w)

    def violation(self, w: Tall) -> Float[Array, "*batch"]:
        """||H||_F / n for the cosines H between the columns, with (|w_j| / max_scale)^2 - 1 on the diagonal
        where it is positive."""
        residual = self.project_symmetric(_gram(unit(w, axis=-2)))
        if self.max_scale is not None:
            excess = jnp.maximum(jnp.sum(jnp.square(w / self.max_scale), axis=-2) - 1, 0)
            residual += excess[..., None] * jnp.eye(w.shape[-1], dtype=w.dtype)
        return _rms(residual)

    def _scale_columns(self, frame: Tall, w: Tall) -> Tall:
        """The frame with the column scales that bring it nearest to w."""
        return frame * self._limit(jnp.sum(frame * w, axis=-2, keepdims=True))

    def _limit(self, scales: Array) -> Array:
        return scales if self.max_scale is None else jnp.minimum(scales, self.max_scale)


@dataclass(frozen=True)
class Oblique(_WithRadius):
    """Columns of norm `radius`, at any angle: the diagonal of W^T W is radius^2."""

    def project_symmetric(self, symmetric: Symmetric) -> Symmetric:
        return symmetric * jnp.eye(symmetric.shape[-1], dtype=symmetric.dtype)

    def retract(self, w: Tall) -> Tall:
        """Every column scaled to the radius; a zero column, which has no nearest point, to equal entries."""
        zero = jnp.all(w == 0, axis=-2, keepdims=True)
        return self._number() * unit(jnp.where(zero, 1, w), axis=-2)

    def violation(self, w: Tall) -> Float[Array, "*batch"]:
        squares = jnp.sum(jnp.square(w / self._number()), axis=-2)
        return jnp.linalg.norm(squares - 1, axis=-1) / w.shape[-1]


def _is_positive(x: object) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x) and x > 0


def _gram(w: Array) -> Array:
    return symmetric_product(w.mT, w)


def _polar_frame(w: Array) -> Array:
    """U V^T with orthonormal columns for every w: the directions that w lacks are filled in."""
    u, _, vt = svd(w)
    return matmul(u, vt)


def _rms(h: Array) -> Array:
    return jnp.linalg.norm(h, axis=(-2, -1)) / h.shape[-1]
