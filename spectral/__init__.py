"""Spectral scaling: matrix functions, initialisers and learning rates that hold a weight's spectral norm."""

from spectral.coordinate_check import CoordinateCheck, Probe, Slope, coordinate_check, log_log_slope
from spectral.diagnostics import (
    Condition,
    ConditionReport,
    alignment,
    condition_report,
    norm_ratios,
    null_space_share,
    singular_shares,
)
from spectral.dimensions import KERNEL, fans, from_matrices, to_matrices
from spectral.initializers import embedding_normal, embedding_orthogonal, spectral_normal, spectral_orthogonal
from spectral.matrix_functions import polar_express_coefficients, power_iteration, spectral_norm
from spectral.matrix_sign import msign
from spectral.normalization import (
    SpectralNormState,
    clip_by_spectral_norm,
    clip_weights,
    normalize_update,
    normalize_weights,
)
from spectral.polar_retraction import polar_retraction
from spectral.products import symmetric_product
from spectral.rules import Role, gaussian_sigma, learning_rate_scale, relative_learning_rate, target_norm

__all__ = [
    "Condition",
    "ConditionReport",
    "CoordinateCheck",
    "KERNEL",
    "Probe",
    "Role",
    "Slope",
    "SpectralNormState",
    "alignment",
    "clip_by_spectral_norm",
    "clip_weights",
    "condition_report",
    "coordinate_check",
    "embedding_normal",
    "embedding_orthogonal",
    "fans",
    "from_matrices",
    "gaussian_sigma",
    "learning_rate_scale",
    "log_log_slope",
    "msign",
    "norm_ratios",
    "normalize_update",
    "normalize_weights",
    "null_space_share",
    "polar_express_coefficients",
    "polar_retraction",
    "power_iteration",
    "relative_learning_rate",
    "singular_shares",
    "spectral_norm",
    "spectral_normal",
    "spectral_orthogonal",
    "symmetric_product",
    "target_norm",
    "to_matrices",
]
