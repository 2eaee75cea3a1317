"""The optimisers that are compared, each with the settings that it is meant for and constant rates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array

from manifold_muon import (
    Assignment,
    Solver,
    assign,
    manifold_muon,
    muon_states,
    named_assignment,
    project_params,
    scale_by_manifold_muon,
)
from spectral import KERNEL
from spectral.paths import map_named, named_leaves

MUON_RATE, ADAM_RATE, MOMENTUM, DECAY = 0.02, 6e-4, 0.95, 0.1
"""The paper's peak rates: a matrix moves as far in each step as it ever does in training."""
REFERENCE = "optax.contrib.muon"
"""What the others' times are given relative to."""


class Directions(NamedTuple):
    """What a step does to the matrices: path -> arrays in the layout of the parameters."""

    g: dict[str, Array]
    """The momentum G that the direction is to be steep for, up to a factor."""
    a: dict[str, Array]
    """The direction A, before rates and retraction."""


@dataclass(frozen=True)
class Contender:
    """An optimiser, and how to see what it does."""

    name: str
    optimizer: optax.GradientTransformation
    assignment: Assignment | None = None
    """Of manifolds to the matrices; None where AdamW has them too."""
    directions: Callable[[Any, Any, Any], Directions] | None = None
    """(gradient, optimizer state, params) -> what the next step does; None for AdamW."""

    def prepare(self, params: Any) -> Any:
        """The parameters where this optimiser starts."""
        return params if self.assignment is None else project_params(params, self.assignment)

    def step(self, params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        """What is timed and counted: the update, and its application."""
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state


def adamw() -> Contender:
    """AdamW for every parameter."""
    return Contender("AdamW", optax.adamw(ADAM_RATE, b2=0.95, weight_decay=DECAY))


def optax_muon() -> Contender:
    """Optax's Muon for the blocks' matrices, layer by layer, and AdamW for the rest."""
    matrices = named_assignment("none")

    def dimension_numbers(params: Any) -> Any:
        assigned = assign(params, matrices)
        return map_named(lambda name, _: KERNEL if name in assigned else None, params)

    optimizer = optax.contrib.muon(
        MUON_RATE,
        beta=MOMENTUM,
        adam_learning_rate=ADAM_RATE,
        adam_b2=0.95,
        adam_weight_decay=DECAY,
        muon_weight_dimension_numbers=dimension_numbers,
    )

    def directions(gradient: Any, state: Any, params: Any) -> Directions:
        kind = optax.contrib.MuonState
        nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
        (muon,) = (node for node in nodes if isinstance(node, kind))
        masked = _only(assign(params, matrices), gradient)
        numbers = jax.tree.map(lambda _: KERNEL, masked)
        scale = optax.contrib.scale_by_muon(beta=MOMENTUM, weight_dimension_numbers=numbers)
        # Its average (1 - beta) g + beta mu, corrected for the start at zero.
        count = muon.count + 1
        mu = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, muon.mu, masked)
        g = jax.tree.map(
            lambda m, g: (
                MOMENTUM * m / (1 - MOMENTUM ** (count + 1)) + (1 - MOMENTUM) * g / (1 - MOMENTUM**count)
            ),
            mu,
            masked,
        )
        return Directions(dict(named_leaves(g)), dict(named_leaves(scale.update(masked, muon)[0])))

    return Contender(REFERENCE, optimizer, matrices, directions)


def ours(name: str, assignment: str, solver: str | Solver = "gram") -> Contender:
    """Manifold Muon for the blocks' matrices, and AdamW for the rest.

    Args:
      name: of the contender.
      assignment: see `named_assignment`.
      solver: of the tangent step.
    """
    manifolds = named_assignment(assignment)
    optimizer = manifold_muon(
        MUON_RATE,
        manifolds,
        adam_learning_rate=ADAM_RATE,
        momentum=MOMENTUM,
        solver=solver,
        adam_weight_decay=DECAY,
    )

    def directions(gradient: Any, state: Any, params: Any) -> Directions:
        (muon,) = muon_states(state)
        assigned = assign(params, manifolds)
        masked = _only(assigned, gradient)
        scale = scale_by_manifold_muon(manifolds, momentum=MOMENTUM, solver=solver)
        a, _ = scale.update(masked, muon, _only(assigned, params))
        g = jax.tree.map(lambda m, g: g + MOMENTUM * (MOMENTUM * m + g), muon.mu, masked)
        return Directions(dict(named_leaves(g)), dict(named_leaves(a)))

    return Contender(name, optimizer, manifolds, directions)


def iterations(state: Any) -> dict[str, np.ndarray]:
    """Path -> iterations that the solver took in the last step, one a matrix; empty for others' states."""
    return {
        name: np.asarray(leaf)
        for muon in muon_states(state)
        for name, leaf in named_leaves(muon.diagnostics.iterations)
    }


def _only(names: Any, tree: Any) -> Any:
    """The tree with other leaves than the named ones masked, as `optax.partition` does."""
    return map_named(lambda name, leaf: leaf if name in names else optax.MaskedNode(), tree)


HETERO = "hetero"


def contenders() -> list[Contender]:
    """Everything that is compared, but for torch's."""
    return [
        adamw(),
        optax_muon(),
        ours("unconstrained", "none"),
        ours("Stiefel", "stiefel"),
        ours("DGram", "dgram"),
        ours("Oblique", "oblique"),
        ours(HETERO, "hetero"),
        ours("hetero, dual ascent", "hetero", "dual_ascent"),
    ]
