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
from spectral.initializers import (
    embedding_normal,
    embedding_orthogonal,
    reinitialize,
    spectral_normal,
    spectral_orthogonal,
)
from spectral.matrix_functions import polar_express_coefficients, power_iteration, spectral_norm
from spectral.matrix_sign import msign
from spectral.normalization import (
    SpectralNormState,
    clip_by_spectral_norm,
    clip_weights,
    normalize_update,
    normalize_weights,
)
from spectral.optimizers import muon_labels, spectral_adamw, spectral_muon, spectral_sgd
from spectral.polar_retraction import polar_retraction
from spectral.products import symmetric_product
from spectral.roles import Decision, decide, format_decisions
from spectral.rules import (
    Role,
    gaussian_sigma,
    gradient_scale,
    learning_rate_scale,
    relative_learning_rate,
    target_norm,
)
from spectral.transforms import learning_rate_multipliers, scale_by_spectral_rule, scale_gradients_to_base

__all__ = [
    "Condition",
    "ConditionReport",
    "CoordinateCheck",
    "Decision",
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
    "decide",
    "embedding_normal",
    "embedding_orthogonal",
    "fans",
    "format_decisions",
    "from_matrices",
    "gaussian_sigma",
    "gradient_scale",
    "learning_rate_multipliers",
    "learning_rate_scale",
    "log_log_slope",
    "msign",
    "muon_labels",
    "norm_ratios",
    "normalize_update",
    "normalize_weights",
    "null_space_share",
    "polar_express_coefficients",
    "polar_retraction",
    "power_iteration",
    "reinitialize",
    "relative_learning_rate",
    "scale_by_spectral_rule",
    "scale_gradients_to_base",
    "singular_shares",
    "spectral_adamw",
    "spectral_muon",
    "spectral_norm",
    "spectral_normal",
    "spectral_orthogonal",
    "spectral_sgd",
    "symmetric_product",
    "target_norm",
    "to_matrices",
]
