"""Commands that exchange models with transformers."""

from pathlib import Path
from typing import Annotated

import tyro

from experiments.commands.settings import Settings
from experiments.exchange.folders import export_run, import_model


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
    config: Annotated[Settings, tyro.conf.arg(name="")],
) -> None:
    """Make a run that starts from a GPT-2 of transformers'; `resume` trains it.

    Args:
        model: Folder with its config.json and model.safetensors.
        run: Folder of the run, a new one.
        config: Settings, from a preset; the model's shape is the folder's.
    """
    import_model(model, run, config)
    print(f"Go on with: python -m experiments resume {run}")
