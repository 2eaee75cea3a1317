"""The search for the largest stable rate, on made-up trials: which rates it tries, and when it stops."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from experiments.errors import InputError
from experiments.reporting.records import final_loss
from experiments.studies.frontier.stability import Frontier, unigram_entropy

RULES = Frontier(unigram_entropy=3.0, start=0.02, doublings=4, halvings=3)


def valley(best: float, largest: float) -> Callable[[float], float | None]:
    """Losses with their minimum at one rate; no rate above `largest` is stable."""
    return lambda rate: 1 + 0.1 * abs(math.log2(rate / best)) if rate <= largest else None


def test_upwards_until_a_rate_does_not_hold() -> None:
    tried = RULES.sweep(valley(best=0.04, largest=0.1))
    assert list(tried) == [0.02, 0.04, 0.08, 0.16]
    assert [loss is None for loss in tried.values()] == [False, False, False, True]


def test_upwards_to_the_cap() -> None:
    assert list(RULES.sweep(valley(best=0.04, largest=math.inf))) == [0.02, 0.04, 0.08, 0.16, 0.32]
    assert RULES.cap == 0.32


def test_downwards_from_a_start_that_does_not_hold() -> None:
    tried = RULES.sweep(valley(best=0.005, largest=0.006))
    assert list(tried) == [0.02, 0.01, 0.005, 0.0025]
    assert list(tried.values()) == [None, None, 1.0, 1.1]


def test_downwards_past_the_best() -> None:
    assert list(RULES.sweep(valley(best=0.02, largest=0.03))) == [0.02, 0.04, 0.01]
    assert list(RULES.sweep(valley(best=0.01, largest=0.03))) == [0.02, 0.04, 0.01, 0.005]


def test_nothing_holds() -> None:
    tried = RULES.sweep(lambda _: None)
    assert list(tried) == [0.02, 0.01, 0.005, 0.0025] and set(tried.values()) == {None}


def test_a_slow_start_is_not_an_unstable_one() -> None:
    """Where even the start learns nothing, sweeps go up, and come down if nothing is found there."""

    def slow(rate: float) -> float | None:
        return 3.2 if rate < 0.05 else 2.0 if rate < 0.2 else None

    assert list(RULES.sweep(slow)) == [0.02, 0.04, 0.08, 0.16, 0.32]

    def stuck(rate: float) -> float | None:
        return 3.2 if rate > 0.004 else 2.0

    assert list(RULES.sweep(stuck)) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.01, 0.005, 0.0025]


@given(best=st.floats(1e-5, 10), largest=st.floats(1e-5, 10))
def test_what_a_sweep_finds(best: float, largest: float) -> None:
    """The largest stable rate and the best loss of all rates within the bounds."""

    trial = valley(best, largest)
    tried = RULES.sweep(trial)
    grid = {0.02 * 2.0**power: trial(0.02 * 2.0**power) for power in range(-3, 5)}
    assert tried == {rate: grid[rate] for rate in tried}
    stable, found = (
        {rate: loss for rate, loss in losses.items() if loss is not None} for losses in (grid, tried)
    )
    assert max(found, default=None) == max(stable, default=None)
    assert min(found.values(), default=None) == min(stable.values(), default=None)


def test_verdicts() -> None:
    losses = {0.32: None, 0.02: 3.0, 0.01: 3.5, 0.04: 2.9, 0.08: 2.99, 0.16: 3.0}
    assert list(RULES.verdicts(losses).items()) == [
        (0.01, "too slow"),
        (0.02, "too slow"),
        (0.04, "stable"),
        (0.08, "stable"),
        (0.16, "unstable"),
        (0.32, "unstable"),
    ]
    assert RULES.verdicts({0.02: None, 0.04: 5.0}) == {0.02: "unstable", 0.04: "too slow"}


def test_a_run_that_ended_early_has_no_final_loss() -> None:
    assert final_loss("finished", 2.5) == 2.5
    assert final_loss("diverged", 2.5) is None and final_loss("non-finite", None) is None


def test_unigram_entropy_is_scipys() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 500, np.uint16) ** 2
    _, counts = np.unique(tokens, return_counts=True)
    assert unigram_entropy(tokens) == pytest.approx(entropy(counts), rel=1e-12)


def test_rules_are_stored_once(tmp_path) -> None:
    study = tmp_path / "new" / "study"
    RULES.save(study)
    RULES.save(study)
    assert Frontier.load(study) == RULES
    with pytest.raises(InputError, match="start is 0.02 there and 0.04 now; use another directory"):
        Frontier(3.0, start=0.04, doublings=4, halvings=3).save(study)
    (study / "frontier.json").write_text('{"start": 1}')
    with pytest.raises(InputError, match="lacks unigram_entropy"):
        Frontier.load(study)
