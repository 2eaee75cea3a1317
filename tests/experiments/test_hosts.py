"""Two processes of four devices each train one run together: as one process does, and through deaths.

Run as a program, this file is one process: `test_hosts.py RUN_DIR TEXT PORT COUNT INDEX LAST`, which kills
itself when the batch of update LAST is asked for.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.config import Data, Model, Optimizer, Run
from experiments.devices import Devices
from experiments.errors import InputError
from experiments.hosts import ALONE, Hosts, join
from experiments.train import train
from tests.experiments.test_devices import numbers
from tests.experiments.test_resume import kill_at

ROOT = Path(__file__).parents[2]
CONFIG = Run(
    model=Model(context=16, layers=2, heads=2, width=16),
    data=Data(batch_size=8, eval_batches=2, probe_sequences=2),
    optimizer=Optimizer("hetero", warmup_steps=2),
    steps=8,
    eval_every=4,
    checkpoint_every=3,
)
NEVER = 0


def configuration(text: Path) -> Run:
    return replace(CONFIG, data=replace(CONFIG.data, corpus=str(text)))


def start(run_dir: Path, text: Path, count: int = 1, deaths: tuple[int, ...] = ()) -> list[subprocess.Popen]:
    """A run's processes; each dies before the update that `deaths` has for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={8 // count}"]),
    }
    # Each has its own compiled programs: of one that several write, another's half may be read.
    processes = []
    for index in range(count):
        last = deaths[index] if deaths else NEVER
        command = [sys.executable, __file__, *map(str, (run_dir, text, port, count, index, last))]
        environment["JAX_COMPILATION_CACHE_DIR"] = f"{run_dir}-compiled-{count}-{index}"
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
    return processes


def finish(processes: list[subprocess.Popen], *codes: int) -> None:
    for process, code in zip(processes, codes, strict=True):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == code, output[-3000:]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 20_000).astype(np.uint8).tobytes())
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text) -> np.ndarray:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train(configuration(text), run_dir, progress=False)
    return numbers(run_dir)


def test_two_processes_are_one_run(alone, text, tmp_path):
    run_dir = tmp_path / "run"
    finish(start(run_dir, text, 2), 0, 0)
    assert len(alone) == 2 * CONFIG.steps + 3
    np.testing.assert_allclose(numbers(run_dir), alone, rtol=1e-5)
    assert (run_dir / "result.json").exists()


def test_from_two_processes_to_one_and_back(alone, text, tmp_path):
    run_dir, killed = tmp_path / "run", -signal.SIGKILL
    finish(start(run_dir, text, 2, (5, 5)), killed, killed)
    finish(start(run_dir, text, 1, (8,)), killed)
    finish(start(run_dir, text, 2), 0, 0)
    np.testing.assert_allclose(numbers(run_dir), alone, rtol=1e-5)


def test_a_death_ends_the_other_process_within_a_minute(text, tmp_path):
    survivor, dying = start(tmp_path / "run", text, 2, (NEVER, 5))
    finish([dying], -signal.SIGKILL)
    died = time.monotonic()
    output, _ = survivor.communicate(timeout=300)
    assert survivor.returncode != 0, output[-3000:]
    assert time.monotonic() - died < 60
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    "hosts",
    [
        Hosts(coordinator="127.0.0.1:1"),
        Hosts(count=2, index=0),
        Hosts(automatic=True, coordinator="127.0.0.1:1", count=2, index=0),
    ],
)
def test_half_told_processes_are_refused(hosts):
    with pytest.raises(InputError, match=r"hosts\.coordinator, hosts\.count and hosts\.index together"):
        join(hosts)


if __name__ == "__main__":
    run_name, text_name, port, count, index, last = sys.argv[1:]
    if int(last):
        kill_at(f"update {last}")
    several = int(count) > 1
    join(Hosts(coordinator=f"127.0.0.1:{port}", count=int(count), index=int(index)) if several else ALONE)
    train(configuration(Path(text_name)), Path(run_name), devices=Devices("mesh", fsdp=2), progress=False)
