"""The reference solver of the tangent step: dual ascent with a decaying step size."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifold_muon.manifolds import Manifold, Unconstrained
from manifold_muon.solvers import Solution
from spectral import msign
from spectral.products import matmul


@dataclass(frozen=True)
class DualAscent:
    """The reference's approximation of `max_A <G, A>`, `||A||_2 <= 1`, `P(A^T W + W^T A) = 0`.

    From L = -1/4 P(W^T G + G^T W), for k = 0..K-1:

        A = msign(G + 2 W L),  H = P(W^T A + A^T W),  L <- L - alpha (1 - k/K) H

    It does not converge on gradients with decaying spectra: on matrices from training it reaches 0.4 to 0.7
    of the optimum at the paper's settings, depends on G's scale, and is tangent only approximately.

    Source: arXiv:2606.13276; Bernstein, "Modular Manifolds", 2025.
    """

    iterations: int = 20
    """K, the number of matrix signs."""
    step_size: float = 0.1
    """alpha."""
    msign_steps: int = 10
    """Polar Express steps in each matrix sign."""
    msign_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the matrix signs' products; the paper's runs use bfloat16."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.msign_steps < 1:
            raise ValueError(f"iterations and msign_steps must be at least 1, got {self}")
        if not self.step_size > 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if self.msign_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"msign_dtype must be float32 or bfloat16, got {self.msign_dtype!r}")

    def init(self, shape: tuple[int, ...], manifold: Manifold) -> None:
        """No warm start: the reference begins anew at every step."""
        del shape, manifold

    @partial(jax.jit, static_argnames=("self", "manifold"))
    def __call__(
        self,
        g: Float[Array, "*batch m n"],
        w: Float[Array, "*batch m n"],
        manifold: Manifold,
        dual: None = None,
    ) -> Solution:
        """The direction A.

        Args:
          g: gradients or momenta, tall (m >= n).
          w: points of the manifold at radius 1, of the same shape.
          manifold: which constraint.
          dual: not used.

        Returns:
          A, of spectral norm 1 (up to the matrix sign's accuracy); its gap is not known.
        """
        del dual
        if isinstance(manifold, Unconstrained):
            return self._solution(self._msign(g), 0)
        project = manifold.project_symmetric

        def body(k: Array, multiplier: Array) -> Array:
            a = self._msign(g + 2 * matmul(w, multiplier))
            decayed = self.step_size * (1 - k / self.iterations)
            return multiplier - decayed * project(_symmetric_product(w, a))

        multiplier = -0.25 * project(_symmetric_product(w, g))
        # The K-th update of the multiplier would not be used.
        multiplier = jax.lax.fori_loop(0, self.iterations - 1, body, multiplier)
        return self._solution(self._msign(g + 2 * matmul(w, multiplier)), self.iterations)

    def _solution(self, a: Array, iterations: int) -> Solution:
        zero = 0 * a[..., 0, 0]
        return Solution(a, None, zero.astype(jnp.int32) + iterations, zero + jnp.nan)

    def _msign(self, x: Array) -> Array:
        dtype = None if self.msign_dtype == "float32" else self.msign_dtype
        return msign(x, steps=self.msign_steps, dtype=dtype)


def _symmetric_product(w: Array, a: Array) -> Array:
    product = matmul(w.mT, a)
    return product + product.mT
