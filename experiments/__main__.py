"""Command line: `python -m experiments {manifolds,train,report} --help`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments.config import PRESETS, preset
from experiments.errors import InputError
from experiments.report import format_table, write_report
from experiments.studies.manifolds import OPTIMIZERS, run_study
from experiments.train import train as train_run


def manifolds(
    preset_name: Annotated[Literal["demo", "tiny", "gpt2-small"], tyro.conf.arg(name="preset")] = "demo",
    dir: Path | None = None,
    optimizers: tuple[str, ...] = OPTIMIZERS,
    corpus: str | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> None:
    """Train one GPT-2 under AdamW, Muon and Muon on each assignment of manifolds, and compare them.

    Started again, it takes up where it was stopped: runs that have ended are kept.

    Args:
        preset_name: Size of the model and length of the runs: demo (200 steps) and tiny (600 steps) are
            for a laptop, gpt2-small is the paper's setting.
        dir: Folder of the study; runs/manifolds-PRESET by default.
        optimizers: adamw, or assignments: none, stiefel, dgram, oblique, hetero, hetero-inv.
        corpus: Text to train on, instead of the preset's: stdlib (this Python's own source), a text file,
            a folder of text files, a .bin of uint16 tokens, or a folder with train.bin and val.bin.
        steps: Updates per run, instead of the preset's; more than its warm-up (20; gpt2-small 1000).
        seed: Of initialisation, batches and dropout.
    """
    config = preset(preset_name)
    config = replace(
        config,
        data=replace(config.data, corpus=corpus or config.data.corpus),
        steps=config.steps if steps is None else steps,
        seed=seed,
    )
    run_study(config, dir or Path("runs") / f"manifolds-{preset_name}", optimizers)


_SETTINGS = tyro.extras.subcommand_type_from_defaults(
    PRESETS,
    {
        "demo": "Settings from preset demo: 200 steps on the standard library's source.",
        "tiny": "Settings from preset tiny: 600 steps on the standard library's source.",
        "gpt2-small": "Settings from preset gpt2-small: the paper's, on OpenWebText.",
    },
)


def train(config: Annotated[_SETTINGS, tyro.conf.arg(name="")], dir: Path) -> None:
    """Train one model, with every setting of the preset open to change.

    Started again with the same settings, it takes up where it was stopped.

    Args:
        config: Settings, from a preset.
        dir: Folder of the run.
    """
    result = train_run(config, dir)
    print(f"{result.status} at step {result.step}: validation loss {result.validation_loss}. {result.reason}")


def report(dir: Annotated[Path, tyro.conf.Positional]) -> None:
    """Write a study's report again from its stored metrics, and print its table.

    Args:
        dir: Folder of the study.
    """
    path = write_report(dir)
    print(format_table(dir))
    print(f"Report: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; bad input ends with its message and exit code 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"manifolds": manifolds, "train": train, "report": report},
            prog="python -m experiments",
            args=arguments,
            description="GPT-2 experiments on the geometry of weights.",
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
