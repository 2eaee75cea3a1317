"""The study of seed 002: one GPT-2 under AdamW, Muon, and Muon with every assignment of manifolds."""

from collections.abc import Sequence
from pathlib import Path

from experiments.config import ADAMW, Run
from experiments.optimizers import manifolds
from experiments.studies.manifolds.report import format_table, write_report
from experiments.studies.named_runs import conclude, load_corpus
from experiments.train import train

OPTIMIZERS: tuple[str, ...] = (ADAMW, "none", "stiefel", "dgram", "hetero", "hetero-inv")


def run_study(
    config: Run, study_dir: Path, optimizers: Sequence[str] = OPTIMIZERS, progress: bool = True
) -> Path:
    """Train one model per optimizer, each in its own folder, then write the report.

    Runs that have ended are not run again, and an interrupted one goes on where it was. A run that
    diverges is a result: the others go on.

    Args:
      config: of every run, but for the optimizer's name.
      study_dir: holds one folder a run, and the report.
      optimizers: `adamw` and names of assignments.
      progress: show progress bars.

    Returns:
      The report's path.
    """
    configs = {name: config.with_optimizer(name) for name in optimizers}
    for named in configs.values():
        manifolds(named)  # an unknown name ends the study before its first run, not after hours
    corpus = load_corpus(config)
    for name, named in configs.items():
        result = train(named, study_dir / name, corpus=corpus, progress=progress)
        if result.status != "finished":
            print(f"{name}: {result.status} at step {result.step}: {result.reason}")
    return conclude(study_dir, write_report, format_table)
