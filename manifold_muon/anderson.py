"""Anderson acceleration of a fixed-point iteration x <- x + f(x)."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifold_muon.manifolds import matmul

_RIDGE = 1e-6


class Anderson(NamedTuple):
    """The last iterates and their steps; empty places hold zeros and count for nothing."""

    iterates: Float[Array, "memory n n"]
    steps: Float[Array, "memory n n"]
    filled: Bool[Array, " memory"]

    @classmethod
    def create(cls, memory: int, x: Float[Array, "n n"]) -> Self:
        zeros = jnp.zeros((memory, *x.shape), x.dtype) + 0 * x
        return cls(zeros, zeros, jnp.zeros(memory, bool) & (zeros[:, 0, 0] != 0))

    def forget(self, when: Bool[Array, ""]) -> Self:
        """The empty memory where `when` holds: the iteration's map has changed."""
        return self._replace(filled=self.filled & ~when)

    def __call__(self, x: Float[Array, "n n"], step: Float[Array, "n n"]) -> tuple[Array, Self]:
        """The next iterate, and the memory with this one in it.

        x + f - (dX + dF) c, where c minimises ||f - dF c||^2 + ridge ||c||^2 over the differences to
        the remembered iterates, each divided by the norm of its dF.

        Source: Walker, Ni, "Anderson acceleration for fixed-point iterations", 2011.
        """
        mask = self.filled[:, None, None]
        d_step = jnp.where(mask, step - self.steps, 0)
        d_x = jnp.where(mask, x - self.iterates, 0)
        size = jnp.sqrt(jnp.sum(d_step**2, axis=(-2, -1), keepdims=True))
        size = jnp.where(size > 0, size, 1)
        d_step, d_x = d_step / size, d_x / size
        memory = len(self.filled)
        rows = d_step.reshape(memory, -1)
        normal = matmul(rows, rows.mT) + _RIDGE * jnp.eye(memory, dtype=x.dtype)
        c = solve_spd(normal, matmul(rows, step.reshape(-1)))
        mixed = x + step - jnp.sum(c[:, None, None] * (d_x + d_step), axis=0)
        new = Anderson(
            jnp.concatenate([x[None], self.iterates[:-1]]),
            jnp.concatenate([step[None], self.steps[:-1]]),
            jnp.concatenate([jnp.ones_like(self.filled[:1]), self.filled[:-1]]),
        )
        return mixed, new


def solve_spd(a: Float[Array, "k k"], b: Float[Array, " k"]) -> Float[Array, " k"]:
    """a^{-1} b for a small positive definite matrix, by elimination without LAPACK or pivots."""
    k = len(b)
    augmented = jnp.concatenate([a, b[:, None]], axis=1)
    for i in range(k):
        row = augmented[i] / augmented[i, i]
        others = augmented - augmented[:, i, None] * row
        augmented = others.at[i].set(row)
    return augmented[:, k]
