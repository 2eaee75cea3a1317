"""The stability frontier: which runs count as stable, and the search for the largest stable rate."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.files import read_json
from experiments.studies.plans import save_plan
from experiments.studies.sweeps import Losses

FRONTIER = "frontier.json"
Verdict = Literal["stable", "unstable", "too slow"]


@dataclass(frozen=True)
class Frontier:
    """How rates are swept, and what a stable one is: the contents of a study's `frontier.json`.

    A run is stable if it makes all its updates (the trainer ends one that meets a number that is not finite
    or a validation loss further than `divergence_margin` above the run's best) and its last validation loss
    is below `unigram_entropy`. Without the latter, weights that can only turn, and so never overflow, would
    count as stable at rates at which nothing is learnt. A run that makes all its updates and ends above it
    is too slow if no run at a lower rate ends below it, and unstable otherwise.
    """

    unigram_entropy: float
    """Entropy of the held-out text's token frequencies (nats): no model without context does better."""
    start: float
    """First rate of a sweep; the others are it times powers of 2."""
    doublings: int = 9
    """Most times that it is doubled."""
    halvings: int = 6
    """Most times that it is halved."""

    @property
    def cap(self) -> float:
        """The largest rate that is tried."""
        return self.start * 2**self.doublings

    def verdicts(self, losses: Losses) -> dict[float, Verdict]:
        """What the runs of one sweep are, in ascending order of their rates."""
        found: dict[float, Verdict] = {}
        for rate in sorted(losses):
            loss = losses[rate]
            if loss is not None and loss < self.unigram_entropy:
                found[rate] = "stable"
            else:
                found[rate] = "unstable" if loss is None or "stable" in found.values() else "too slow"
        return found

    def sweep(self, trial: Callable[[float], float | None]) -> dict[float, float | None]:
        """Tries rates: upwards from the start until one is unstable, then downwards past the best loss.

        Going down ends at the first rate with a higher loss than the one above it, so that the best is not
        merely the lowest that was tried; where no rate was stable, it goes on until one is.

        Args:
          trial: trains at a rate and gives the final loss; None if the run ended before its last update.

        Returns:
          Every rate tried, in that order, and what the trial gave.
        """
        losses = {self.start: trial(self.start)}
        rate = self.start
        while rate < self.cap and self.verdicts(losses)[rate] != "unstable":
            rate *= 2
            losses[rate] = trial(rate)
        rate = self.start
        while rate > self.start / 2**self.halvings and self._may_improve_below(rate, losses):
            rate /= 2
            losses[rate] = trial(rate)
        return losses

    def _may_improve_below(self, lowest: float, losses: Losses) -> bool:
        best = min((loss for loss in losses.values() if loss is not None), default=None)
        return losses[lowest] == best or "stable" not in self.verdicts(losses).values()

    def save(self, study_dir: Path) -> None:
        """Writes `frontier.json`, or checks that the one that is there is the same.

        Raises:
          InputError: it is not.
        """
        save_plan(study_dir / FRONTIER, asdict(self))

    @classmethod
    def load(cls, study_dir: Path) -> "Frontier":
        """What `save` wrote.

        Raises:
          InputError: the file is damaged.
        """
        names = [field.name for field in fields(cls)]
        content = read_json(study_dir / FRONTIER, require=names)
        return cls(*(content[name] for name in names))


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy (nats) of the frequencies of a text's tokens."""
    counts = np.unique_counts(tokens).counts
    share = counts / counts.sum()
    return float(-np.sum(share * np.log(share)))
