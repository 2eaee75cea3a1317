"""Manifold Muon: optimisers whose weights stay on matrix manifolds, a different one for each module."""

from manifold_muon.assignments import ASSIGNMENTS, assign, assignment
from manifold_muon.dual_ascent import DualAscent
from manifold_muon.manifolds import DGram, Manifold, Oblique, Stiefel, Unconstrained, gram_off_diagonal
from manifold_muon.projection import constraint_violations, project_params
from manifold_muon.stacking import from_tall, to_tall
from manifold_muon.transforms import ManifoldMuonState, manifold_muon, retract, scale_by_manifold_muon

__all__ = [
    "ASSIGNMENTS",
    "DGram",
    "DualAscent",
    "Manifold",
    "ManifoldMuonState",
    "Oblique",
    "Stiefel",
    "Unconstrained",
    "assign",
    "assignment",
    "constraint_violations",
    "from_tall",
    "gram_off_diagonal",
    "manifold_muon",
    "project_params",
    "retract",
    "scale_by_manifold_muon",
    "to_tall",
]
