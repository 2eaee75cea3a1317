"""Commands that run a study, or write its report again."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import tyro

from experiments.config import SOLVERS, Run, Solver, preset
from experiments.studies.frontier import report as frontier_report
from experiments.studies.frontier.stability import FRONTIER
from experiments.studies.frontier.study import ASSIGNMENTS, run_frontier
from experiments.studies.manifolds import report as manifolds_report
from experiments.studies.manifolds.study import OPTIMIZERS, run_study
from experiments.studies.named_runs import conclude
from experiments.studies.sel import calibration_report
from experiments.studies.sel import report as sel_report
from experiments.studies.sel.calibration import calibrate as run_calibration
from experiments.studies.sel.plan import PLAN as SEL_PLAN
from experiments.studies.sel.plan import SEL_PRESETS, SelStudy
from experiments.studies.sel.study import run_sel
from experiments.studies.spectral import report as spectral_report
from experiments.studies.spectral.plan import PLAN as SPECTRAL_PLAN
from experiments.studies.spectral.plan import SPECTRAL_PRESETS
from experiments.studies.spectral.study import run_spectral


def manifolds(
    preset_name: Annotated[
        Literal["demo", "tiny", "narrow", "gpt2-small"] | None, tyro.conf.arg(name="preset")
    ] = None,
    dir: Path | None = None,
    frontier: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    optimizers: tuple[str, ...] | None = None,
    solver: Solver | None = None,
    corpus: str | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> None:
    """Train one GPT-2 under AdamW, Muon and Muon on each assignment of manifolds, and compare them.

    Started again, it takes up where it was stopped: runs that have ended are kept.

    Args:
        preset_name: Size of the model and length of the runs: demo (150 steps, the default) and tiny
            (600 steps) are for a laptop, gpt2-small is the paper's setting, narrow is the frontier's
            (half tiny's width, 150 steps).
        dir: Folder of the study; by default runs/manifolds-PRESET, with the solver's name after it if it is
            not ours, or runs/frontier-PRESET.
        frontier: Sweep Muon's rate by factors of 2 for every assignment and both solvers until runs
            diverge, instead of comparing them at one rate. It has preset narrow by default.
        optimizers: adamw (not with --frontier), or assignments: none, stiefel, dgram, oblique, hetero,
            hetero-inv.
        solver: gram is ours and the default; dual_ascent is the paper's, with the reference's retraction of
            DGram. A frontier has both by default.
        corpus: Text to train on, instead of the preset's: stdlib (this Python's own source), a text file,
            a folder of text files, a .bin of uint16 tokens, or a folder with train.bin and val.bin.
        steps: Updates per run, instead of the preset's; more than its warm-up (20; gpt2-small 1000).
        seed: Of initialisation, batches and dropout.
    """
    preset_name = preset_name or ("narrow" if frontier else "demo")
    config = replace(_changed(preset(preset_name), corpus, steps), seed=seed)
    if frontier:
        solvers = SOLVERS if solver is None else (solver,)
        run_frontier(
            config, dir or Path("runs") / f"frontier-{preset_name}", optimizers or ASSIGNMENTS, solvers
        )
        return
    config = config if solver is None else config.with_solver(solver)
    suffix = "-dual_ascent" if config.optimizer.solver == "dual_ascent" else ""
    run_study(config, dir or Path("runs") / f"manifolds-{preset_name}{suffix}", optimizers or OPTIMIZERS)


def sel(
    preset_name: Annotated[Literal["tiny", "paper"], tyro.conf.arg(name="preset")] = "tiny",
    dir: Path | None = None,
    calibrate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    corpus: str | None = None,
    steps: int | None = None,
) -> None:
    """Train GPT-2s of several widths and depths with SymExpLin and without, and compare them.

    Started again, it takes up where it was stopped: runs that have ended are kept.

    Args:
        preset_name: The grid: tiny (widths 64, 128 and 192, 2 and 4 layers, an hour on two cores), or
            paper, the nine models of the paper on OpenWebText.
        dir: Folder of the study; by default runs/sel-PRESET, or runs/sel-calibration-PRESET.
        calibrate: Compare curvatures and courses of the scales' rates at the grid's middle model instead.
        corpus: Text to train on, instead of the preset's (see manifolds).
        steps: Updates per run, instead of the preset's; more than its warm-up (20; paper 1000).
    """
    study = SEL_PRESETS[preset_name]
    base = _changed(study.base, corpus, steps)
    run, name = (run_calibration, "sel-calibration") if calibrate else (run_sel, "sel")
    run(replace(study, base=base), dir or Path("runs") / f"{name}-{preset_name}")


def spectral(
    preset_name: Annotated[Literal["tiny", "paper"], tyro.conf.arg(name="preset")] = "tiny",
    dir: Path | None = None,
    corpus: str | None = None,
    steps: int | None = None,
) -> None:
    """Train GPT-2s of several widths in the standard and the spectral parametrisation, and compare them.

    It checks how features grow with the width, and whether the best learning rate stays where it was, under
    AdamW, SGD and Muon. Started again, it takes up where it was stopped: what has ended is kept.

    Args:
        preset_name: The models: tiny (2 layers, widths 32 to 256, an hour and a half on two cores), or paper
            (12 layers, widths 256 to 2048, on OpenWebText).
        dir: Folder of the study; by default runs/spectral-PRESET.
        corpus: Text to train on, instead of the preset's (see manifolds).
        steps: Updates per run, instead of the preset's; more than its warm-up (20; paper 500).
    """
    study = SPECTRAL_PRESETS[preset_name]
    base = _changed(study.base, corpus, steps)
    run_spectral(replace(study, base=base), dir or Path("runs") / f"spectral-{preset_name}")


def report(dir: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write a study's report again from its stored metrics, and print its table.

    Args:
        dir: Folder of the study.
    """
    study = _report_module(dir)
    conclude(dir, study.write_report, study.format_table)


def _changed(config: Run, corpus: str | None, steps: int | None) -> Run:
    return replace(
        config,
        data=replace(config.data, corpus=corpus or config.data.corpus),
        steps=config.steps if steps is None else steps,
    )


def _report_module(dir: Path) -> ModuleType:
    if (dir / FRONTIER).exists():
        return frontier_report
    if (dir / SPECTRAL_PLAN).exists():
        return spectral_report
    if (dir / SEL_PLAN).exists():
        return {"grid": sel_report, "calibration": calibration_report}[SelStudy.load(dir)[1]]
    return manifolds_report
