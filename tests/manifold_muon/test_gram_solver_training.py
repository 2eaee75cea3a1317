"""The Gram-space solver on what it meets in training, at its default tolerance and with its warm start."""

import numpy as np
import pytest

from experiments.config import Data, Model, Optimizer, Run, preset
from experiments.corpus import load
from manifold_muon import GramSolver
from tests.manifold_muon import tangent_oracle as oracle
from tests.manifold_muon.training_matrices import Captured, Stack, capture, short_text

SMALL = Run(
    model=Model(context=64, layers=2, heads=2, width=32),
    data=Data(batch_size=32),
    optimizer=Optimizer(name="hetero", warmup_steps=5),
    steps=40,
).with_solver("gram")


def feasible_shares(stack: Stack, upper_bounds: list[float]) -> list[float]:
    """For each layer the value of the optimizer's direction, made exactly feasible, over a bound on all."""
    directions = GramSolver()(stack.g, stack.w, stack.manifold, stack.dual).direction
    return [
        oracle.feasible_value(g, np.asarray(a), w, stack.kind) / upper
        for g, w, a, upper in zip(stack.g, stack.w, directions, upper_bounds, strict=True)
    ]


def optima(stack: Stack) -> list[float]:
    """By the oracle."""
    return [oracle.solve(g, w, stack.kind).upper for g, w in zip(stack.g, stack.w, strict=True)]


def certified_bounds(stack: Stack) -> list[float]:
    """By the dual of a finer solution."""
    duals = GramSolver(tolerance=1e-3, max_iterations=50)(stack.g, stack.w, stack.manifold).dual
    duals = [None] * len(stack.g) if duals is None else np.asarray(duals)
    return [
        oracle.certified_bound(g, w, stack.kind, dual)
        for g, w, dual in zip(stack.g, stack.w, duals, strict=True)
    ]


def assert_few_iterations(captured: Captured) -> None:
    """Over the whole run: a median of 6 per matrix, and of 8 per call, which waits for its slowest matrix.

    Not counted are square Stiefel weights, which need none.
    """
    calls = [np.concatenate(call, axis=1) for call in captured.iterations.values()]
    iterative = [call for call in calls if call.any()]
    assert np.median(np.concatenate([call.ravel() for call in iterative])) <= 6
    assert np.median(np.stack([call.max(axis=1) for call in iterative])) <= 8


@pytest.mark.parametrize("name", ["hetero", "oblique"])
def test_a_short_run(name):
    config = SMALL.with_optimizer(name)
    captured = capture(config, short_text(config), {0, 1, 20, 39})
    assert len(captured.stacks) == 16
    for stack in captured.stacks:
        assert min(feasible_shares(stack, optima(stack))) >= 0.99, (stack.step, stack.name)
    assert_few_iterations(captured)


@pytest.mark.slow
def test_the_tiny_preset():
    """Beginning, middle and end of the whole run."""
    config = preset("tiny").with_solver("gram")
    corpus = load(config.data.corpus, vocab_size=config.model.vocab_size, context=config.model.context)
    windows = [*range(4), *range(298, 302), *range(596, 600)]
    captured = capture(config, corpus, windows)
    assert len(captured.stacks) == 4 * len(windows)
    for stack in captured.stacks:
        assert min(feasible_shares(stack, certified_bounds(stack))) >= 0.99, (stack.step, stack.name)
    assert_few_iterations(captured)
