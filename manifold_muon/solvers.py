"""What every solver of the tangent step takes and gives."""

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int

from manifold_muon.manifolds import Manifold


class Solution(NamedTuple):
    """A tangent direction, and how good it is known to be."""

    direction: Float[Array, "*batch m n"]
    """A: W - eta A descends. Its spectral norm is at most 1."""
    dual: Float[Array, "*batch n n"] | None
    """The constraint's multiplier in units of g's RMS singular value: the next call's warm start."""
    iterations: Int[Array, "*batch"]
    """Iterations made."""
    gap: Float[Array, "*batch"]
    """Relative duality gap: <g, A> is at least (1 - gap) times the optimum; NaN where it is not known."""


class Solver(Protocol):
    """Finds the steepest tangent direction: max <g, A>, ||A||_2 <= 1, P(A^T W + W^T A) = 0."""

    def init(self, shape: tuple[int, ...], manifold: Manifold) -> Float[Array, "*batch n n"] | None:
        """The dual to begin with for matrices of this shape (..., m, n): zeros, or None if it needs none."""
        ...

    def __call__(
        self,
        g: Float[Array, "*batch m n"],
        w: Float[Array, "*batch m n"],
        manifold: Manifold,
        dual: Float[Array, "*batch n n"] | None = None,
    ) -> Solution:
        """The direction for gradients g at points w of the manifold at radius 1, both tall (m >= n)."""
        ...
