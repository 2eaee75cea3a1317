"""A short run on random words, for what is done with finished runs."""

import random
from dataclasses import replace
from pathlib import Path

from experiments.config import Data, Model, Optimizer, Run
from experiments.train import train

SETTINGS = Run(
    model=Model(context=80, layers=2, heads=2, width=16),
    data=Data(batch_size=4, eval_batches=2, probe_sequences=2),
    optimizer=Optimizer("adamw", learning_rate=1e-2, warmup_steps=2),
    steps=20,
    eval_every=20,
    checkpoint_every=20,
)


def with_text(config: Run, folder: Path) -> Run:
    """The configuration, on a text that is written into the folder."""
    words = ["def", "return", "self", "for", "in", "(x)", "é", "\n"]
    path = folder / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=20_000)))
    return replace(config, data=replace(config.data, corpus=str(path)))


def trained(config: Run, folder: Path) -> Path:
    """The folder of a run of it."""
    train(with_text(config, folder), folder / "run", progress=False)
    return folder / "run"
