"""SymExpLin (SEL): learning in curved weight space, with any optax optimiser, folded away after training."""

from sel_jax.inverse import invert
from sel_jax.parameters import (
    CURVATURE,
    beta_for,
    decay_mask,
    default_beta,
    effective,
    fold,
    labels,
    reparametrize,
    unfold,
)
from sel_jax.schedules import ScaleRatesState, annealed, scale_rates
from sel_jax.symexplin import SATURATION, SCALES, SymExpLin
from sel_jax.weights import SelWeight

__all__ = [
    "CURVATURE",
    "SATURATION",
    "SCALES",
    "ScaleRatesState",
    "SelWeight",
    "SymExpLin",
    "annealed",
    "beta_for",
    "decay_mask",
    "default_beta",
    "effective",
    "fold",
    "invert",
    "labels",
    "reparametrize",
    "scale_rates",
    "unfold",
]
