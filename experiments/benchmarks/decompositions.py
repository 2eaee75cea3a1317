"""Operations of matrix decompositions, by the textbook's formulas for their classical algorithms.

Golub and Van Loan, "Matrix Computations", 4th ed.: 8.3 (symmetric QR with vectors), 8.6 (R-SVD), 5.2 (QR and
its thin Q), 3.2 (LU), 4.2 (Cholesky), 3.1 (triangular systems). What a machine runs may be another algorithm:
on accelerators XLA takes one of several times as many operations.
"""

import math
from collections.abc import Callable

from jax.extend.core import JaxprEqn


def _matrix(eqn: JaxprEqn, operand: int = 0) -> tuple[float, int, int]:
    """Batch size, longer and shorter side."""
    *batch, rows, columns = eqn.invars[operand].aval.shape
    return float(math.prod(batch)), max(rows, columns), min(rows, columns)


def _eigh(eqn: JaxprEqn) -> float:
    batch, n, _ = _matrix(eqn)
    return batch * 9 * n**3


def _svd(eqn: JaxprEqn) -> float:
    batch, m, n = _matrix(eqn)
    if not eqn.params["compute_uv"]:
        return batch * (2 * m * n**2 + 2 * n**3)
    if eqn.params["full_matrices"]:
        return batch * (4 * m**2 * n + 22 * n**3)
    return batch * (6 * m * n**2 + 20 * n**3)


def _qr(eqn: JaxprEqn) -> float:
    batch, m, n = _matrix(eqn)
    return batch * 2 * (2 * m * n**2 - 2 * n**3 / 3)


def _lu(eqn: JaxprEqn) -> float:
    batch, m, n = _matrix(eqn)
    return batch * (m * n**2 - n**3 / 3)


def _cholesky(eqn: JaxprEqn) -> float:
    batch, n, _ = _matrix(eqn)
    return batch * n**3 / 3


def _triangular_solve(eqn: JaxprEqn) -> float:
    n = eqn.invars[0].aval.shape[-1]
    return float(n * math.prod(eqn.invars[1].aval.shape))


DECOMPOSITIONS: dict[str, Callable[[JaxprEqn], float]] = {
    "eigh": _eigh,
    "svd": _svd,
    "qr": _qr,
    "lu": _lu,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}
"""JAX primitive -> operations of one of its equations, over the whole batch."""
UNKNOWN_DECOMPOSITIONS = frozenset(
    {"cholesky_update", "eig", "geqp3", "geqrf", "hessenberg", "householder_product", "ormqr", "schur"}
    | {"tridiagonal"}
)
"""Primitives for which there is no formula here."""
