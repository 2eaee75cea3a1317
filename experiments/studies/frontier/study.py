"""The stability frontier: for every assignment of manifolds and solver, the largest rate of Muon that holds.

The paper's instability took 50,000 steps at one rate. What lets weights without a bound grow is the sum of
the rates, so a short sweep over rates reaches as far as a long run, and compares the assignments there.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.config import ADAMW, SOLVERS, Run, Solver
from experiments.corpus import Corpus
from experiments.errors import InputError
from experiments.optimizers import manifolds
from experiments.studies.frontier.report import format_table, write_report
from experiments.studies.frontier.stability import Frontier, unigram_entropy
from experiments.studies.named_runs import conclude, load_corpus, train_named

ASSIGNMENTS: tuple[str, ...] = ("none", "stiefel", "dgram", "hetero", "hetero-inv")


def run_frontier(
    config: Run,
    study_dir: Path,
    assignments: Sequence[str] = ASSIGNMENTS,
    solvers: Sequence[Solver] = SOLVERS,
    progress: bool = True,
) -> Path:
    """Sweeps Muon's peak rate for every assignment and solver, as `Frontier` says, then writes the report.

    Each run has its own folder, `hetero-gram-lr0.04` and so on. Runs that have ended are not run again, and
    an interrupted one goes on where it was. The unconstrained step is a matrix sign under every solver, so
    it is swept under the first alone.

    Args:
      config: of every run, but for the assignment, the solver and Muon's rate, which is where sweeps start.
      study_dir: holds one folder a run, `frontier.json` and the report.
      assignments: their names.
      solvers: their names.
      progress: show progress bars.

    Returns:
      The report's path.

    Raises:
      InputError: an unknown assignment, AdamW (which has no rate of Muon's), no assignment or solver at all,
        or what `train` refuses.
    """
    if ADAMW in assignments:
        raise InputError(f"{ADAMW} has no rate of Muon's to sweep: leave it out of a frontier's optimizers")
    configs = [
        config.with_solver(solver).with_optimizer(name)
        for name in assignments
        for solver in (solvers[:1] if name == "none" else solvers)
    ]
    if not configs:
        raise InputError("a frontier needs at least one assignment and one solver")
    for each in configs:
        manifolds(each)  # an unknown name ends the study before its first run, not after an hour
    corpus = load_corpus(config)
    frontier = Frontier(unigram_entropy(corpus.validation), config.optimizer.muon_learning_rate)
    frontier.save(study_dir)
    for each in configs:
        _sweep(each, frontier, study_dir, corpus, progress)
    return conclude(study_dir, write_report, format_table)


def _sweep(config: Run, frontier: Frontier, study_dir: Path, corpus: Corpus, progress: bool) -> None:
    optimizer = config.optimizer

    def trial(rate: float) -> float | None:
        at_rate = replace(config, optimizer=replace(optimizer, muon_learning_rate=rate))
        name = f"{optimizer.name}-{optimizer.solver}-lr{rate:g}"
        return train_named(at_rate, study_dir / name, corpus, progress)

    frontier.sweep(trial)
