"""Weights & Biases beside the metrics' file: every step once, in whichever start it was made."""

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.errors import InputError
from experiments.files import CONFIG, METRICS
from experiments.loggers import WANDB, open_loggers
from experiments.metrics import MetricsWriter, RunLog
from experiments.train import train
from tests.experiments.exchange.runs import SETTINGS, with_text

PROJECT = "curves"
SMALL = replace(SETTINGS, model=replace(SETTINGS.model, layers=1, context=16), steps=8)


class Server:
    """What stands for Weights & Biases: it keeps the runs that are sent to it, and the package's `init`."""

    Error = type("Error", (Exception,), {})

    def __init__(self, online: bool) -> None:
        self.online = online
        self.sent: list[tuple[str, int, str, float]] = []
        """Run, step, tag, number."""
        self.settings: list[dict] = []
        self.exit_codes: list[int] = []

    def init(self, **settings: object) -> "Started":
        self.settings.append(settings)
        return Started(self, settings["id"])

    def rows(self) -> dict[int, dict[str, float]]:
        """Step -> tag -> number, of the only run; fails if one was sent twice."""
        assert len({run for run, *_ in self.sent}) == 1
        assert set(Counter((step, tag) for _, step, tag, _ in self.sent).values()) == {1}
        rows: dict[int, dict[str, float]] = {}
        for _, step, tag, number in self.sent:
            rows.setdefault(step, {})[tag] = number
        return rows


class Started:
    """A run in one process, whose steps only rise."""

    def __init__(self, server: Server, id: str) -> None:
        self.server, self.id = server, id
        known = [step for run, step, *_ in server.sent if run == id]
        self.starting_step = max(known, default=-1) + 1 if server.online else 0
        self.step = self.starting_step

    def log(self, data: dict[str, float], step: int, commit: bool) -> None:
        assert commit and step >= self.step, "the package ignores what comes late"
        self.server.sent += [(self.id, step, tag, number) for tag, number in data.items()]
        self.step = step + 1

    def finish(self, exit_code: int) -> None:
        self.server.exit_codes.append(exit_code)


@pytest.fixture(params=[True, False], ids=["online", "offline"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """In the place of the package, which is too large for every test environment."""
    server, module = Server(request.param), ModuleType("wandb")
    module.init, module.Error = server.init, server.Error
    monkeypatch.setitem(sys.modules, "wandb", module)
    return server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_text('{"config": {"steps": 9}}')
    return tmp_path


def write(run_dir: Path, steps: range, resume_step: int | None = None, wandb: str | None = PROJECT) -> None:
    """Writes steps, flushes at every fourth, and does not close: as in a kill, the last one may be lost."""
    metrics = MetricsWriter(open_loggers(run_dir, resume_step, wandb))
    for step in steps:
        metrics.write("train", step, loss=np.float32(step), gradient_norm=np.nan)
        if step % 2 == 0:
            metrics.write("eval", step, loss=10.0 * step, weights={"mlp": {"sigma": np.array([1.0, step])}})
        if step % 4 == 0:
            metrics.flush()


def expected(steps: range) -> dict[int, dict[str, float]]:
    return {
        step: {"train/loss": step}
        | ({"eval/loss": 10 * step, "weights/mlp/sigma": max(1, step)} if step % 2 == 0 else {})
        for step in steps
    }


def test_no_step_is_sent_twice_after_a_kill(server: Server, run_dir: Path) -> None:
    write(run_dir, range(0, 8))
    write(run_dir, range(5, 12), resume_step=4)
    assert server.rows() == expected(range(11))
    first, second = server.settings
    assert first == second
    assert first["project"] == PROJECT and first["resume"] == "allow" and first["name"] == run_dir.name
    assert first["config"] == {"config": {"steps": 9}} and first["dir"] == str(run_dir)


def test_a_kill_at_the_checkpoint(server: Server, run_dir: Path) -> None:
    """The step whose checkpoint is resumed from was sent whole, and is not sent again."""
    write(run_dir, range(0, 5))
    assert server.rows() == expected(range(5))
    write(run_dir, range(5, 7), resume_step=4)
    assert server.rows() == expected(range(6))


def test_steps_of_a_start_without_it_are_sent_later(server: Server, run_dir: Path) -> None:
    write(run_dir, range(0, 6))
    write(run_dir, range(5, 10), resume_step=4, wandb=None)
    write(run_dir, range(9, 11), resume_step=8)
    assert server.rows() == expected(range(10))


def test_a_run_that_starts_anew(server: Server, run_dir: Path) -> None:
    """Its checkpoints are lost; Weights & Biases goes on where it was."""
    write(run_dir, range(0, 3))
    write(run_dir, range(0, 6))
    assert server.rows() == expected(range(5))


def test_another_project(server: Server, run_dir: Path) -> None:
    write(run_dir, range(2))
    with pytest.raises(InputError, match="is in project 'curves' .* not 'other'"):
        write(run_dir, range(2, 3), resume_step=1, wandb="other")


def test_a_damaged_id(server: Server, run_dir: Path) -> None:
    (run_dir / WANDB).write_text("{")
    with pytest.raises(InputError, match="wandb.json is not JSON"):
        write(run_dir, range(2))


def test_what_the_package_refuses(server: Server, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise server.Error("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(InputError, match="api_key not configured.*WANDB_MODE=offline"):
        write(run_dir, range(2))
    assert not (run_dir / WANDB).exists()


def test_only_the_first_process_logs(server: Server, run_dir: Path) -> None:
    with RunLog(SETTINGS, run_dir, None, progress=False, writes=False, wandb=PROJECT) as log:
        log.evaluation(0, {"loss": 1.0})
    assert not server.settings and not (run_dir / METRICS).exists()


@pytest.mark.parametrize("server", [False], ids=["offline"], indirect=True)
def test_a_run_interrupted_and_resumed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is what the metrics' file ends up with, but for the speed, measured anew."""
    config, run_dir = with_text(SMALL, tmp_path), tmp_path / "run"
    evaluation = RunLog.evaluation

    def interrupted(log: RunLog, step: int, values: dict) -> None:
        if step == config.steps:
            raise KeyboardInterrupt
        evaluation(log, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "evaluation", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config, run_dir, progress=False, wandb=PROJECT)
    train(config, run_dir, progress=False, wandb=PROJECT)
    assert server.exit_codes == [1, 0]

    rows, lines = server.rows(), [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    assert list(rows) == list(range(config.steps + 1))
    for line in lines:
        if line["kind"] == "train":
            for name in ("loss", "gradient_norm", "learning_rate"):
                assert rows[line["step"]][f"train/{name}"] == line[name]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert rows[config.steps]["eval/loss"] == last["loss"]
    assert rows[config.steps]["attention/max_logit"] == max(last["attention"]["max_logit"])


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error before anything is written if it was asked for, and else is not looked for."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # Any import of it fails.
    config = with_text(SMALL, tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["train", "--dir", str(tmp_path / "run"), "--wandb", PROJECT, "demo"])
    assert exit.value.code == 2 and "Weights & Biases is not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(config, tmp_path / "run", progress=False).status == "finished"


def records(path: Path) -> list:
    """Of a run's file: seven bytes, then blocks of 32 kB, of records in parts with a header each."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            found.append(Record.FromString(part))
            part = b""
    return found


def test_the_package_itself_offline(tmp_path: Path) -> None:
    """In processes of their own: stopped by an error at one moment, and taken up again."""
    pytest.importorskip("wandb")
    (tmp_path / CONFIG).write_text("{}")
    program = """
import sys
from pathlib import Path
from experiments.loggers import open_loggers
from experiments.metrics import MetricsWriter
folder, first, last, resume_step = sys.argv[1:]
with MetricsWriter(open_loggers(Path(folder), int(resume_step) or None, "curves")) as metrics:
    for step in range(int(first), int(last)):
        metrics.write("train", step, loss=step / 2)
        metrics.write("eval", step, loss=step / 4)
        if step == 4:
            metrics.flush()
    assert resume_step != "0", "stopped"
"""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for first, last, resume_step, code in ((0, 8, 0, 1), (5, 11, 4, 0)):
        arguments = [sys.executable, "-c", program, *map(str, (tmp_path, first, last, resume_step))]
        done = subprocess.run(
            arguments, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    found = [record for path in files for record in records(path)]
    assert len({record.run.run_id for record in found if record.HasField("run")}) == 1
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [(row["_step"], row["train/loss"], row["eval/loss"]) for row in rows] == [
        (step, step / 2, step / 4) for step in range(11)
    ]
