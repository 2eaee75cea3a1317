"""Command line: `python -m experiments --help` lists the commands."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import jax
import tyro

from experiments import preemption
from experiments.config import PRESETS, SOLVERS, Run, Solver, preset
from experiments.devices import ONE, Devices
from experiments.errors import InputError
from experiments.exchange.folders import export_run, import_model, stored_config
from experiments.hosts import ALONE, Hosts, is_first, join
from experiments.preemption import Preempted
from experiments.sample import sample as sample_run
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
from experiments.train import train as train_run


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


def _changed(config: Run, corpus: str | None, steps: int | None) -> Run:
    return replace(
        config,
        data=replace(config.data, corpus=corpus or config.data.corpus),
        steps=config.steps if steps is None else steps,
    )


_SETTINGS = tyro.extras.subcommand_type_from_defaults(
    PRESETS,
    {
        "demo": "Settings from preset demo: 150 steps on the standard library's source.",
        "tiny": "Settings from preset tiny: 600 steps on the standard library's source.",
        "narrow": "Settings from preset narrow: half tiny's width and context, 150 steps.",
        "gpt2-small": "Settings from preset gpt2-small: the paper's, on OpenWebText.",
    },
)


def train(
    config: Annotated[_SETTINGS, tyro.conf.arg(name="")],
    dir: Path,
    devices: Devices = ONE,
    hosts: Hosts = ALONE,
) -> None:
    """Train one model, with every setting of the preset open to change.

    Started again with the same settings, on whatever devices, it takes up where it was stopped.

    Args:
        config: Settings, from a preset.
        dir: Folder of the run.
        devices: Where it is trained.
        hosts: Processes that train it together; all of them see the same folder.
    """
    join(hosts)
    _train(config, dir, devices)


def resume(dir: Annotated[Path, tyro.conf.Positional], devices: Devices = ONE, hosts: Hosts = ALONE) -> None:
    """Go on with a run, with the settings that its folder holds.

    Args:
        dir: Folder of the run.
        devices: Where it is trained.
        hosts: Processes that train it together; all of them see the same folder.
    """
    join(hosts)
    _train(stored_config(dir), dir, devices)


def _train(config: Run, dir: Path, devices: Devices) -> None:
    result = train_run(config, dir, devices=devices)
    if is_first():
        loss = result.validation_loss
        print(f"{result.status} at step {result.step}: validation loss {loss}. {result.reason}")


def export(run: Annotated[Path, tyro.conf.Positional], dir: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write a run's model as a folder that transformers' GPT2LMHeadModel.from_pretrained loads.

    Args:
        run: Folder of the run; its latest checkpoint counts.
        dir: Folder of the model, a new one.
    """
    export_run(run, dir)
    print(f"Model: {dir}")


def import_(
    model: Annotated[Path, tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    config: Annotated[_SETTINGS, tyro.conf.arg(name="")],
) -> None:
    """Make a run that starts from a GPT-2 of transformers'; `resume` trains it.

    Args:
        model: Folder with its config.json and model.safetensors.
        run: Folder of the run, a new one.
        config: Settings, from a preset; the model's shape is the folder's.
    """
    import_model(model, run, config)
    print(f"Go on with: python -m experiments resume {run}")


def sample(
    run: Annotated[Path, tyro.conf.Positional],
    prompt: str = "def ",
    count: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """Continue a text with a run's model of bytes.

    Args:
        run: Folder of the run; its latest checkpoint counts.
        prompt: How the text begins.
        count: Bytes to add; with the prompt they fit in the model's context.
        temperature: What the logits are divided by before a byte is drawn; 0 takes the likeliest.
        seed: Of the draws.
    """
    print(prompt + sample_run(run, prompt, count, temperature, seed))


def report(dir: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write a study's report again from its stored metrics, and print its table.

    Args:
        dir: Folder of the study.
    """
    study = _report_module(dir)
    conclude(dir, study.write_report, study.format_table)


def _report_module(dir: Path) -> ModuleType:
    if (dir / FRONTIER).exists():
        return frontier_report
    if (dir / SPECTRAL_PLAN).exists():
        return spectral_report
    if (dir / SEL_PLAN).exists():
        return {"grid": sel_report, "calibration": calibration_report}[SelStudy.load(dir)[1]]
    return manifolds_report


def _keep_compiled() -> None:
    """Has JAX keep what it compiles, unless it is told where already.

    A study's runs share most of their programs, and a run that is taken up again all of them.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", "runs/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; bad input ends with its message and exit code 2."""
    _keep_compiled()
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "manifolds": manifolds,
                "sel": sel,
                "spectral": spectral,
                "train": train,
                "resume": resume,
                "sample": sample,
                "export": export,
                "import": import_,
                "report": report,
            },
            prog="python -m experiments",
            args=arguments,
            description="GPT-2 experiments on the geometry of weights.",
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        sys.exit(preemption.EXIT_CODE)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
