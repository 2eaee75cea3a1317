"""Calibration of SEL: how curved the map is, and how the scales' rates move, at one model of a grid."""

from pathlib import Path

from experiments.studies.named_runs import conclude, load_corpus, train_named
from experiments.studies.sel.calibration_report import format_table, write_report
from experiments.studies.sel.plan import ANNEALINGS, FIXED, SelStudy


def calibrate(study: SelStudy, study_dir: Path, progress: bool = True) -> Path:
    """Compares curvatures, then courses of the scales' rates, in the grid's middle cell.

    Each curvature is tried at every one of `calibration_rates` with the scales' rates held fixed, and then
    every course at the best of them, with `seeds` seeds.
    Runs that have ended are not run again, and an interrupted one goes on where it was.

    Args:
      study: its plan.
      study_dir: holds one folder a run, `sel.json`, and the report.
      progress: show progress bars.

    Returns:
      The report's path.

    Raises:
      InputError: the folder holds another study, or what `train` refuses.
    """
    corpus = load_corpus(study.base)
    study.save(study_dir, "calibration")

    def trial(curvature: float, rate: float, annealing: str, seed: int = 0) -> float | None:
        name = f"c{curvature:g}-lr{rate:g}-{annealing}-s{seed}"
        run = study.calibration(curvature, rate, annealing, seed)
        return train_named(run, study_dir / name, corpus, progress)

    losses = {
        (curvature, rate): trial(curvature, rate, FIXED)
        for curvature in study.curvatures
        for rate in study.calibration_rates
    }
    ended = {key: loss for key, loss in losses.items() if loss is not None}
    if ended:
        best = min(ended, key=ended.__getitem__)
        for annealing in ANNEALINGS:
            for seed in range(study.seeds):
                trial(*best, annealing, seed)
    return conclude(study_dir, write_report, format_table)
