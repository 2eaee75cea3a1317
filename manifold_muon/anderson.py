"""Anderson acceleration of a fixed-point iteration x <- x + f(x)."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spectral.products import matmul

_RIDGE = 1e-6


class Anderson(NamedTuple):
    """The last iterates' differences, in a ring; empty places count for nothing."""

    step: Float[Array, "n n"]
    """f at the last iterate."""
    image: Float[Array, "n n"]
    """x + f there."""
    d_step: Float[Array, "memory n n"]
    """Differences of consecutive f."""
    d_image: Float[Array, "memory n n"]
    """Differences of consecutive x + f."""
    gram: Float[Array, "memory memory"]
    """Inner products of the d_step."""
    filled: Bool[Array, " memory"]
    seen: Int[Array, ""]
    """Iterates seen since the memory was empty."""

    @classmethod
    def create(cls, memory: int, x: Float[Array, "n n"]) -> Self:
        # Made from x, so that over a mapped axis it varies as x does.
        zero, ring = 0 * x, jnp.zeros((memory, *x.shape), x.dtype) + 0 * x
        gram = ring[:, :1, 0] * jnp.zeros(memory, x.dtype)
        return cls(zero, zero, ring, ring, gram, gram[0] != 0, (0 * x[0, 0]).astype(jnp.int32))

    def forget(self, when: Bool[Array, ""]) -> Self:
        """The empty memory where `when` holds: the iteration's map has changed."""
        return self._replace(filled=self.filled & ~when, seen=jnp.where(when, 0, self.seen))

    def __call__(self, x: Float[Array, "n n"], step: Float[Array, "n n"]) -> tuple[Array, "Anderson"]:
        """The next iterate, and the memory with this one in it.

        x + f - (dX + dF) c, where c minimises ||f - dF c||^2 + ridge ||c||^2, each difference divided by the
        norm of its dF.

        Source: Walker, Ni, "Anderson acceleration for fixed-point iterations", 2011.
        """
        memory, image = len(self.filled), x + step
        # The first iterate has no difference; its place is taken by the second's.
        slot = jnp.maximum(self.seen - 1, 0) % memory
        d_step = self.d_step.at[slot].set(step - self.step)
        d_image = self.d_image.at[slot].set(image - self.image)
        filled = self.filled.at[slot].set(self.seen > 0)
        rows = d_step.reshape(memory, -1)
        inner = matmul(rows, rows[slot])
        gram = self.gram.at[slot].set(inner).at[:, slot].set(inner)
        square = jnp.diagonal(gram)
        scale = jnp.where(filled & (square > 0), jnp.where(square > 0, square, 1) ** -0.5, 0)
        normal = scale[:, None] * gram * scale + _RIDGE * jnp.eye(memory, dtype=x.dtype)
        c = scale * solve_spd(normal, scale * matmul(rows, step.reshape(-1)))
        mixed = image - matmul(c, d_image.reshape(memory, -1)).reshape(x.shape)
        return mixed, Anderson(step, image, d_step, d_image, gram, filled, self.seen + 1)


def solve_spd(a: Float[Array, "k k"], b: Float[Array, " k"]) -> Float[Array, " k"]:
    """a^{-1} b for a small positive definite matrix, by elimination without LAPACK or pivots."""
    k = len(b)
    augmented = jnp.concatenate([a, b[:, None]], axis=1)
    for i in range(k):
        row = augmented[i] / augmented[i, i]
        others = augmented - augmented[:, i, None] * row
        augmented = others.at[i].set(row)
    return augmented[:, k]
