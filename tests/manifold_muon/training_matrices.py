"""What the optimizer meets in training: gradients, weights and duals, taken out of a run of the trainer."""

import _pydecimal
from collections import defaultdict
from collections.abc import Container
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.config import Run
from experiments.corpus import Corpus, load, train_batches
from experiments.optimizers import manifolds
from experiments.train import TrainState, make_program
from manifold_muon import Assigned, Manifold, assign, muon_states, to_tall
from spectral.paths import named_leaves

ByName = dict[str, np.ndarray]


class Stack(NamedTuple):
    """One parameter's matrices (layers, m, n) at one step, tall, and the dual that the optimizer had."""

    step: int
    name: str
    manifold: Manifold
    g: np.ndarray
    w: np.ndarray
    dual: np.ndarray | None
    """None where the solver needs none."""

    @property
    def kind(self) -> str:
        """The manifold's name for the oracle."""
        return type(self.manifold).__name__.lower()


class Captured(NamedTuple):
    """Of one run."""

    stacks: list[Stack]
    """At the steps asked for."""
    iterations: dict[tuple[Manifold, tuple[int, ...]], list[np.ndarray]]
    """Manifold and shape, which make a stack -> (steps, layers) for each parameter in it, of every step."""


def short_text(config: Run) -> Corpus:
    """Two hundred kilobytes of Python."""
    return load(_pydecimal.__file__, vocab_size=config.model.vocab_size, context=config.model.context)


def capture(config: Run, corpus: Corpus, steps: Container[int]) -> Captured:
    """Runs the trainer and keeps what the optimizer's solver was given at some of the steps."""
    program = make_program(config, corpus)
    state = program.initial_state()
    specs = assign(state.params, manifolds(config))
    batches = train_batches(
        corpus,
        batch_size=config.data.batch_size,
        context=config.model.context,
        seed=config.seed,
        start_step=0,
        stop_step=config.steps,
    )
    stacks: list[Stack] = []
    iterations: dict[str, list[np.ndarray]] = {name: [] for name in specs}
    shapes = {name: to_tall(leaf).shape[1:] for name, leaf in named_leaves(state.params) if name in specs}
    for step, tokens in enumerate(batches):
        # Copied now, as the update takes over the state's buffers.
        before = _solvers_input(state) if step in steps else None
        state, _ = program.train_step(state, program.where.batch(tokens))
        (muon,) = muon_states(state.opt_state)
        for name, found in _by_name(muon.diagnostics.iterations).items():
            iterations[name].append(found)
        if before is not None:
            stacks += _stacks(step, *before, _by_name(muon.mu), specs, config.optimizer.momentum)
    calls: dict[tuple[Manifold, tuple[int, ...]], list[np.ndarray]] = defaultdict(list)
    for name, found in iterations.items():
        calls[specs[name].manifold, shapes[name]].append(np.stack(found))
    return Captured(stacks, calls)


def _stacks(
    step: int,
    w: ByName,
    mu: ByName,
    dual: ByName,
    new_mu: ByName,
    specs: dict[str, Assigned],
    momentum: float,
) -> list[Stack]:
    found = []
    for name, b in new_mu.items():
        # Nesterov's direction g + momentum * b, with g = b - momentum * (the last b).
        g, w_tall = _tall(b - momentum * mu[name] + momentum * b), _tall(w[name])
        warm = dual[name] if dual[name].shape[-1] == g.shape[-1] else None
        found.append(Stack(step, name, specs[name].manifold, g, w_tall, warm))
    return found


def _tall(x: np.ndarray) -> np.ndarray:
    return np.asarray(to_tall(jnp.asarray(x)))


def _solvers_input(state: TrainState) -> tuple[ByName, ByName, ByName]:
    """Weights, momenta and duals."""
    (muon,) = muon_states(state.opt_state)
    return _by_name(state.params), _by_name(muon.mu), _by_name(muon.dual)


def _by_name(tree: Any) -> ByName:
    return {name: np.array(leaf) for name, leaf in named_leaves(tree)}
