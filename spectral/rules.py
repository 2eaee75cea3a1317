"""The spectral parametrisation's table: initial scales and learning rates by role, fan-in and fan-out.

Condition 1 of arXiv:2310.17813: a matrix and each of its updates have a spectral norm of
sqrt(fan_out / fan_in). An embedding acts on one-hot vectors and a bias on the constant 1, so both count
as matrices with fan_in = 1.
"""

import math
from enum import Enum
from typing import Literal

OptimizerKind = Literal["sgd", "adam", "muon"]


class Role(Enum):
    """What a parameter does in the forward pass."""

    MATRIX = "matrix"
    READOUT = "readout"
    """A matrix whose outputs, the logits, do not grow with the width. It has a matrix's rules: fan_out, being
    fixed, only leaves fan_in in every ratio to a base model."""
    EMBEDDING = "embedding"
    BIAS = "bias"
    GAIN = "gain"


_MATRICES = (Role.MATRIX, Role.READOUT)


def target_norm(fan_in: int, fan_out: int) -> float:
    """sqrt(fan_out / fan_in), the spectral norm of a matrix and of its updates (Condition 1)."""
    _require_fans(fan_in, fan_out)
    return math.sqrt(fan_out / fan_in)


def gaussian_sigma(role: Role, fan_in: int, fan_out: int, simplified: bool = False) -> float:
    """Standard deviation of a Gaussian initialisation.

    Args:
      role: of the parameter.
      fan_in, fan_out: of one matrix (fan_in is ignored for embeddings and biases).
      simplified: for matrices and readouts, Parametrization 1's
        `min(1, sqrt(fan_out/fan_in)) / sqrt(fan_in)`, up to twice the default
        `sqrt(fan_out/fan_in) / (sqrt(fan_in) + sqrt(fan_out))`, which bounds the expected spectral norm by
        the target and comes within 3 % of it from 64 x 64 on.

    Returns:
      sigma; 0 for a bias, and for a gain, which starts at 1 exactly.

    Source: arXiv:2310.17813, section 4 ("random initialization") and Parametrization 1.
    """
    _require_role(role)
    _require_fans(fan_in, fan_out)
    if role is Role.EMBEDDING:
        return 1.0
    if role not in _MATRICES:
        return 0.0
    if simplified:
        return min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)
    return target_norm(fan_in, fan_out) / (math.sqrt(fan_in) + math.sqrt(fan_out))


def learning_rate_scale(role: Role, optimizer: OptimizerKind, fan_in: int, fan_out: int) -> float:
    """Factor that turns a width-independent learning rate into this parameter's.

    Args:
      role: of the parameter.
      optimizer: `sgd` (the raw gradient), `adam` (entries of size 1, spectral norm
        sqrt(fan_in * fan_out) when aligned) or `muon` (spectral norm 1).
      fan_in, fan_out: of one matrix (fan_in is ignored for embeddings, biases and gains).

    Returns:
      For a matrix or readout fan_out / fan_in, 1 / fan_in or sqrt(fan_out / fan_in); for an embedding, bias
      or gain fan_out under SGD and 1 under Adam.

    Raises:
      ValueError: Muon for a parameter that is not a matrix: an orthogonal V x d update has rows that
        shrink with V / d. Use Adam there.
    """
    _require_role(role)
    _require_fans(fan_in, fan_out)
    if optimizer not in ("sgd", "adam", "muon"):
        raise ValueError(f"unknown optimizer kind {optimizer!r}: choose sgd, adam or muon")
    if role in _MATRICES:
        return {"sgd": fan_out / fan_in, "adam": 1 / fan_in, "muon": target_norm(fan_in, fan_out)}[optimizer]
    if optimizer == "muon":
        raise ValueError(
            f"Muon's orthogonal update is for matrices, not for a parameter with role {role.value}: use Adam"
        )
    return float(fan_out) if optimizer == "sgd" else 1.0


def relative_learning_rate(
    role: Role, optimizer: OptimizerKind, fans: tuple[int, int], base_fans: tuple[int, int]
) -> float:
    """Factor on a learning rate tuned at a base model: the scale here over the scale there.

    Args:
      role, optimizer: as in `learning_rate_scale`.
      fans: (fan_in, fan_out) of the parameter.
      base_fans: the same of its counterpart in the base model.
    """
    return learning_rate_scale(role, optimizer, *fans) / learning_rate_scale(role, optimizer, *base_fans)


def gradient_scale(role: Role, fan_in: int, fan_out: int) -> float:
    """Size of a gradient's entries, as it depends on the width: 1 / fan_out for every role.

    SGD's rate times this size must be Adam's rate times 1, so it is the quotient of the two columns of the
    table: the loss moves by Theta(1) when all fan_out outputs do, so each of them accounts for 1 / fan_out.

    Args:
      role, fan_in, fan_out: as in `learning_rate_scale`.
    """
    adam, sgd = (learning_rate_scale(role, optimizer, fan_in, fan_out) for optimizer in ("adam", "sgd"))
    return adam / sgd


def _require_role(role: Role) -> None:
    if not isinstance(role, Role):
        raise TypeError(f"role must be a Role such as Role.MATRIX, got {role!r}")


def _require_fans(fan_in: int, fan_out: int) -> None:
    if fan_in < 1 or fan_out < 1:
        raise ValueError(f"fan_in and fan_out must be at least 1, got {fan_in} and {fan_out}")
