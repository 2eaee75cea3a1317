"""Manifold Muon: optimisers whose weights stay on matrix manifolds, a different one for each module."""

from manifold_muon.assignments import (
    ASSIGNMENTS,
    Assigned,
    Assignment,
    assign,
    named_assignment,
)
from manifold_muon.dual_ascent import DualAscent
from manifold_muon.gram_solver import GramSolver
from manifold_muon.manifolds import DGram, Manifold, Oblique, Stiefel, Unconstrained
from manifold_muon.optimizer import manifold_muon
from manifold_muon.projection import constraint_violations, project_params
from manifold_muon.solvers import Solution, Solver
from manifold_muon.stacking import from_tall, to_tall
from manifold_muon.transforms import (
    Diagnostics,
    ManifoldMuonState,
    muon_states,
    retract,
    scale_by_manifold_muon,
)
from spectral.dimensions import DimensionNumbers

__all__ = [
    "ASSIGNMENTS",
    "Assigned",
    "Assignment",
    "DGram",
    "Diagnostics",
    "DimensionNumbers",
    "DualAscent",
    "GramSolver",
    "Manifold",
    "ManifoldMuonState",
    "Oblique",
    "Solution",
    "Solver",
    "Stiefel",
    "Unconstrained",
    "assign",
    "constraint_violations",
    "from_tall",
    "manifold_muon",
    "muon_states",
    "named_assignment",
    "project_params",
    "retract",
    "scale_by_manifold_muon",
    "to_tall",
]
