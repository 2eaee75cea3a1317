"""Commands on single runs: train, go on, sample."""

from pathlib import Path
from typing import Annotated

import tyro

from experiments.commands.settings import Settings
from experiments.config import Run
from experiments.devices import ONE, Devices
from experiments.exchange.folders import stored_config
from experiments.hosts import ALONE, Hosts, is_first, join
from experiments.sample import sample as sample_run
from experiments.train import train as train_run


def train(
    config: Annotated[Settings, tyro.conf.arg(name="")],
    dir: Path,
    devices: Devices = ONE,
    hosts: Hosts = ALONE,
    wandb: str | None = None,
) -> None:
    """Train one model, with every setting of the preset open to change.

    Started again with the same settings, on whatever devices, it takes up where it was stopped.

    Args:
        config: Settings, from a preset.
        dir: Folder of the run.
        devices: Where it is trained.
        hosts: Processes that train it together; all of them see the same folder.
        wandb: Project at Weights & Biases that gets the metrics too, whatever an earlier start did.
    """
    join(hosts)
    _train(config, dir, devices, wandb)


def resume(
    dir: Annotated[Path, tyro.conf.Positional],
    devices: Devices = ONE,
    hosts: Hosts = ALONE,
    wandb: str | None = None,
) -> None:
    """Go on with a run, with the settings that its folder holds.

    Args:
        dir: Folder of the run.
        devices: Where it is trained.
        hosts: Processes that train it together; all of them see the same folder.
        wandb: Project at Weights & Biases that gets the metrics too, whatever an earlier start did.
    """
    join(hosts)
    _train(stored_config(dir), dir, devices, wandb)


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


def _train(config: Run, dir: Path, devices: Devices, wandb: str | None) -> None:
    result = train_run(config, dir, devices=devices, wandb=wandb)
    if is_first():
        loss = result.validation_loss
        print(f"{result.status} at step {result.step}: validation loss {loss}. {result.reason}")
