"""The study of seed 003: AdamW with and without SEL over a grid of models, each at its own best rate."""

from pathlib import Path

from experiments.studies.named_runs import conclude, load_corpus, train_named
from experiments.studies.sel.overhead import overhead
from experiments.studies.sel.plan import (
    ABLATIONS,
    BASELINE,
    SEL,
    Cell,
    SelStudy,
    Trial,
)
from experiments.studies.sel.report import format_table, write_report
from experiments.studies.sweeps import best_rate, sweep


def run_sel(study: SelStudy, study_dir: Path, progress: bool = True) -> Path:
    """Runs a study: sweeps of the rate, more seeds at the best ones, ablations, and what a step costs.

    Every run has its own folder, `w64-d2-sel-lr0.004-s0` and so on. Runs that have ended are not run
    again, and an interrupted one goes on where it was; so it is with the times of steps.

    Args:
      study: its plan.
      study_dir: holds one folder a run, `sel.json`, a file of times a cell, and the report.
      progress: show progress bars.

    Returns:
      The report's path.

    Raises:
      InputError: the folder holds another study, or what `train` refuses.
    """
    corpus = load_corpus(study.base)
    study.save(study_dir, "grid")

    def run(trial: Trial) -> float | None:
        return train_named(study.config(trial), study_dir / trial.name, corpus, progress)

    best = {}
    for cell in study.cells:
        pair = [study.config(Trial(cell, method, study.rates[0], 0)) for method in (BASELINE, SEL)]
        overhead(*pair, corpus, study_dir / f"overhead-{cell}.json")
        for method in (BASELINE, SEL):
            losses = sweep(
                study.rates,
                study.extensions,
                lambda rate, cell=cell, method=method: run(Trial(cell, method, rate, 0)),
            )
            best[cell, method] = best_rate(losses)
            if best[cell, method] is None:
                print(f"{cell}: no run of {method} made all its updates")
                continue
            for seed in range(1, study.seeds):
                run(Trial(cell, method, best[cell, method], seed))
    cell = Cell(*study.ablation)
    for method in ABLATIONS if best[cell, SEL] is not None else ():
        for seed in range(study.seeds):
            run(Trial(cell, method, best[cell, SEL], seed))
    return conclude(study_dir, write_report, format_table)
