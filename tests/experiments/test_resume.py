"""A run that is killed, anywhere, and started again ends as one that never was, bit for bit.

Run as a program, this file is the run that kills itself: `test_resume.py RUN_DIR TEXT MOMENT`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import train as training
from experiments.checkpoints import Checkpoints, on_default_device
from experiments.config import Data, Model, Optimizer, Run
from experiments.preemption import EXIT_CODE, Preempted
from experiments.train import train

ROOT = Path(__file__).parents[2]
STEPS = 14

# Dropout, accumulation and both optimizers, so that much could depend on more than the step.
CONFIG = Run(
    model=Model(context=16, layers=2, heads=2, width=16, dropout=0.1),
    data=Data(batch_size=4, accumulation=2, eval_batches=2, probe_sequences=2),
    optimizer=Optimizer("hetero", warmup_steps=2, solver_iterations=3, msign_steps=5),
    steps=STEPS,
    eval_every=3,
    checkpoint_every=4,
    log_every=5,
)


def configuration(text):
    return replace(CONFIG, data=replace(CONFIG.data, corpus=str(text)))


def kill_at(moment):
    """Arranges this process's death.

    `update N`: when the batch of update N is asked for; `SIGTERM N`: told to stop then. Else a regular
    expression: before the first such operation on files, in whichever thread. These are Python's audit
    events, `os.mkdir PATH`, `os.rename FROM TO` and, with the tree that is being removed, `shutil.rmtree
    PATH os.rmdir NAME`.
    """
    if moment.startswith(("update", "SIGTERM")):
        last, train_batches = int(moment.split()[1]), training.train_batches
        deadly = signal.SIGKILL if moment.startswith("update") else signal.SIGTERM

        def batches(*arguments, start_step, **settings):
            all_batches = train_batches(*arguments, start_step=start_step, **settings)
            for step, tokens in enumerate(all_batches, start_step + 1):
                if step == last:
                    os.kill(os.getpid(), deadly)
                yield tokens

        training.train_batches = batches
    elif moment:
        tree = ""

        def hook(event, arguments):
            nonlocal tree
            operation = " ".join([event, *map(str, arguments)])
            if event == "shutil.rmtree":
                tree = operation
            elif event == "os.rmdir":
                operation = f"{tree} {operation}"
            if event.startswith("os.") and re.search(moment, operation):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)


def environment(run_dir):
    # A cache per run: the starts of one run compile once, and different runs each on their own.
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{run_dir}-compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def command(run_dir, text, moment=""):
    return [sys.executable, __file__, str(run_dir), str(text), moment]


def run_process(run_dir, text, moment=""):
    """The return code of a run in a process of its own, killed at the given moment."""
    process = subprocess.run(
        command(run_dir, text, moment), env=environment(run_dir), capture_output=True, text=True, check=False
    )
    if process.returncode not in (0, -signal.SIGKILL, EXIT_CODE):
        raise AssertionError(process.stderr)
    return process.returncode


def without_speed(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["kind"] != "speed"]


def final_state(run_dir, text):
    config = configuration(text)
    initial = jax.eval_shape(lambda: training.init_state(config, training.make_optimizer(config)))
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest_step == STEPS
        return checkpoints.restore(on_default_device(initial))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 20_000).astype(np.uint8).tobytes())
    return path


MOMENTS = [
    "update 3",  # Before the first checkpoint.
    r"os.rename \S+/4\S+-tmp \S+/4 ",  # The first checkpoint is written, not yet committed.
    r"os.mkdir \S+/8\S+-tmp ",  # The metrics are on disk, the save has hardly begun.
    "SIGTERM 9",  # Told to stop, it saves and goes.
    "update 11",  # Between checkpoints.
    "update 13",  # Right after a save was started; it may be complete, or not.
    r"shutil.rmtree \S+/checkpoints/\d+ .* os.rmdir d ",  # An old checkpoint is half deleted.
    r"os.rename \S+/result.json.tmp ",  # After the last step.
]


def test_killed_and_started_again(tmp_path, text):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_process(whole, text) == 0
    for moment in MOMENTS:
        ended = EXIT_CODE if moment.startswith("SIGTERM") else -signal.SIGKILL
        assert run_process(killed, text, moment) == ended, f"not ended at {moment!r}"
        if ended == EXIT_CODE:
            with Checkpoints(killed / "checkpoints") as checkpoints:
                assert checkpoints.latest_step == int(moment.split()[1])
        assert not (killed / "result.json").exists()
    assert run_process(killed, text) == 0

    assert without_speed(killed) == without_speed(whole)
    assert len(without_speed(whole)) == STEPS + len([0, 3, 6, 9, 12, 14])
    for name in ("result.json", "config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    left, right = (final_state(run_dir, text) for run_dir in (whole, killed))
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(left), strict=True)
    assert len(leaves) > 20
    for path, a, b in zip(paths, leaves, jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


if __name__ == "__main__":
    run_dir, text_path, moment_of_death = sys.argv[1:]
    kill_at(moment_of_death)
    try:
        train(configuration(text_path), Path(run_dir), progress=False)
    except Preempted:
        sys.exit(EXIT_CODE)
