"""Runs that are killed at random moments, over and over, for ten minutes."""

import random
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.experiments.test_resume import command, environment, final_state, run_process, text, without_speed

pytestmark = pytest.mark.soak
SECONDS = 600
__all__ = ["text"]


def run_with_kills(run_dir: Path, text: Path, moments: random.Random) -> int:
    """Starts the run, and again, until it ends; how often it was killed."""
    for kills in range(10_000):
        process = subprocess.Popen(
            command(run_dir, text),
            env=environment(run_dir),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, errors = process.communicate(timeout=moments.uniform(2, 12))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        assert process.returncode == 0, errors.decode()
        return kills
    raise AssertionError("it never ended")


def test_random_kills(tmp_path, text):
    whole, seed = tmp_path / "whole", random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    assert run_process(whole, text) == 0
    expected, start, kills, runs = final_state(whole, text), time.monotonic(), 0, 0
    while time.monotonic() - start < SECONDS:
        run_dir = tmp_path / f"run-{runs}"
        kills, runs = kills + run_with_kills(run_dir, text, moments), runs + 1
        assert without_speed(run_dir) == without_speed(whole)
        found = final_state(run_dir, text)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    print(f"{runs} runs, {kills} kills: all ended as the one that was not killed, bit for bit")
    assert kills > runs, f"-{signal.SIGKILL} came too rarely"
