"""Sweeps of a learning rate on a grid of factors of 2, which goes on where the best one lies at an end."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments.reporting.panels import Curve

Losses = Mapping[float, float | None]
"""Rate -> final validation loss; None for a run that ended before its last update."""


def loss_curve(losses: Losses) -> Curve:
    """Rates, ascending, and losses, as a panel draws them: NaN where a run ended before its last update."""
    rates = sorted(losses)
    return np.array(rates), np.array([np.nan if losses[rate] is None else losses[rate] for rate in rates])


def best_rate(losses: Losses) -> float | None:
    """The rate with the lowest loss, the lower one of equals; None if no run made all its updates."""
    ended = {rate: loss for rate, loss in losses.items() if loss is not None}
    return min(sorted(ended), key=ended.__getitem__, default=None)


def beyond_the_edge(losses: Losses) -> float | None:
    """The rate to try next, if the best one lies at an end of those tried: a factor of 2 beyond that end.

    Where no run made all its updates, that is half the lowest. None if the best lies between two others.
    """
    best = best_rate(losses)
    if best is None or best == min(losses):
        return min(losses) / 2
    return 2 * best if best == max(losses) else None


def sweep(rates: tuple[float, ...], extensions: int, trial: Callable[[float], float | None]) -> Losses:
    """Tries all rates, and then up to `extensions` more beyond the end at which the best one lies.

    Args:
      rates: of the grid.
      extensions: most rates that are added.
      trial: trains at a rate and gives the final loss; None if the run ended before its last update.

    Returns:
      Every rate tried, in that order, and what the trial gave.
    """
    losses = {rate: trial(rate) for rate in rates}
    for _ in range(extensions):
        rate = beyond_the_edge(losses)
        if rate is None:
            break
        losses[rate] = trial(rate)
    return losses
