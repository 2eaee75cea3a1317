"""Manifold Muon: optimisers whose weights stay on matrix manifolds, a different one for each module."""

from manifold_muon.assignments import (
    ASSIGNMENTS,
    Assigned,
    Assignment,
    DimensionNumbers,
    assign,
    named_assignment,
)
from manifold_muon.dual_ascent import DualAscent, Solver
from manifold_muon.manifolds import DGram, Manifold, Oblique, Stiefel, Unconstrained
from manifold_muon.projection import constraint_violations, project_params
from manifold_muon.stacking import from_tall, to_tall
from manifold_muon.transforms import ManifoldMuonState, manifold_muon, retract, scale_by_manifold_muon

__all__ = [
    "ASSIGNMENTS",
    "Assigned",
    "Assignment",
    "DGram",
    "DimensionNumbers",
    "DualAscent",
    "Manifold",
    "ManifoldMuonState",
    "Oblique",
    "Solver",
    "Stiefel",
    "Unconstrained",
    "assign",
    "constraint_violations",
    "from_tall",
    "manifold_muon",
    "named_assignment",
    "project_params",
    "retract",
    "scale_by_manifold_muon",
    "to_tall",
]
