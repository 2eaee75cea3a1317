"""The study of seed 000: do sizes and best rates hold as GPT-2 grows wider, in each parametrisation?"""

from pathlib import Path

from experiments.reporting.records import mean
from experiments.studies.named_runs import conclude, load_corpus, train_named
from experiments.studies.spectral.check import run_check
from experiments.studies.spectral.plan import SpectralStudy, Sweep, Trial
from experiments.studies.spectral.report import format_table, write_report
from experiments.studies.sweeps import best_rate, sweep


def run_spectral(study: SpectralStudy, study_dir: Path, progress: bool = True) -> Path:
    """Runs a study: coordinate checks, then sweeps of the rate at every width, narrow models first.

    A rate that is best at the smallest width is tried at the largest in any case.

    Every run has its own folder, `spectral-adamw-w64-lr0.004-s0` and so on, and every check its file. What
    has ended is not done again, and an interrupted run goes on where it was.

    Args:
      study: its plan.
      study_dir: holds one folder a run, a file a check, `spectral.json` and the report.
      progress: show progress bars.

    Returns:
      The report's path.

    Raises:
      InputError: the folder holds another study, or what `train` refuses.
    """
    corpus = load_corpus(study.base)
    study.save(study_dir)
    for check in study.checks:
        print(f"{check.name}\n{run_check(study, check, corpus, study_dir)}", flush=True)

    def loss(which: Sweep, rate: float) -> float | None:
        losses = []
        for seed in range(study.seeds):
            trial = Trial(*which, rate, seed)
            losses.append(train_named(study.config(trial), study_dir / trial.name, corpus, progress))
        # A rate at which one seed diverges is no rate to choose.
        return None if None in losses else mean(losses)

    losses = {
        which: sweep(
            study.rates[which.optimizer], study.extensions, lambda rate, which=which: loss(which, rate)
        )
        for which in study.sweeps
    }
    for which in study.sweeps:
        if which.width == max(study.widths):
            tuned = best_rate(losses[which._replace(width=min(study.widths))])
            if tuned is not None and tuned not in losses[which]:
                loss(which, tuned)
    return conclude(study_dir, write_report, format_table)
