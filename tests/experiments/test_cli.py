"""The command line, as a person types it: runs, help, and bad input without a traceback."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.commands import runs as run_commands
from experiments.commands import studies as study_commands
from experiments.config import Run, preset
from experiments.preemption import EXIT_CODE, Preempted
from experiments.studies.frontier.study import ASSIGNMENTS
from experiments.studies.manifolds.study import OPTIMIZERS
from experiments.studies.sel.plan import SEL_PRESETS

ROOT = Path(__file__).parents[2]
SMALL = ("--model.layers", 1, "--model.width", 16, "--model.context", 16, "--data.batch-size", 4)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int | None = None) -> str:
    """What a command prints, whitespace and frames folded; it must end with this exit code."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
        raise SystemExit(None)
    assert exit.value.code == code
    out, err = capsys.readouterr()
    return " ".join((out + err).replace("│", " ").split())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 40 kB."""
    words = ["def", "return", "self", "for", "in", "(x)", "\n"]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=10_000)))
    return path


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    overview = shown(capsys, "--help", code=0)
    assert all(command in overview for command in ("manifolds", "sel", "train", "report", "compare"))
    options = shown(capsys, "manifolds", "--help", code=0)
    assert "demo,tiny,narrow,gpt2-small}" in options and "--frontier" in options
    assert "gram,dual_ascent}" in options


def test_told_to_stop(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM has an exit code of its own, and a message that says what to do (the saving: test_resume)."""

    def preempted(*_: object, **__: object) -> None:
        raise Preempted(7)

    monkeypatch.setattr(run_commands, "train_run", preempted)
    printed = shown(capsys, "train", "--dir", tmp_path, "demo", code=EXIT_CODE)
    assert "saved after update 7" in printed and "same command goes on" in printed


def test_train_then_report(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study" / "hetero"
    arguments = ("train", "--dir", folder, "demo", "--steps", 25, "--data.corpus", text, *SMALL)
    command = [sys.executable, "-m", "experiments", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "finished at step 25" in done.stdout
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished" and result["validation_loss"] < 5.5  # log 256 = 5.545
    assert "finished at step 25" in shown(capsys, *arguments)  # an ended run is not run again

    reported = shown(capsys, "report", tmp_path / "study")
    assert "hetero" in reported and f"{result['validation_loss']:.4f}" in reported
    assert (tmp_path / "study" / "report.html").exists()

    message = shown(capsys, *arguments, "--model.heads", 2, code=2)
    assert "another configuration" in message and "model.heads: 4 -> 2" in message


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of every study that a command starts; nothing is trained."""
    started: list[tuple] = []
    monkeypatch.setattr(study_commands, "run_study", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(study_commands, "run_frontier", lambda *arguments: started.append(arguments))
    for name in ("run_sel", "run_calibration"):
        monkeypatch.setattr(
            study_commands, name, lambda *arguments, name=name: started.append((name, *arguments))
        )
    return started


@pytest.mark.parametrize(
    ("arguments", "config", "folder", "rest"),
    [
        ((), preset("demo"), "runs/manifolds-demo", (OPTIMIZERS,)),
        (("--preset", "tiny", "--solver", "gram"), preset("tiny"), "runs/manifolds-tiny", (OPTIMIZERS,)),
        (
            ("--preset", "tiny", "--solver", "dual_ascent"),
            preset("tiny").with_solver("dual_ascent"),
            "runs/manifolds-tiny-dual_ascent",
            (OPTIMIZERS,),
        ),
        (
            ("--dir", "mine", "--optimizers", "hetero", "--solver", "dual_ascent", "--seed", 3),
            replace(preset("demo").with_solver("dual_ascent"), seed=3),
            "mine",
            (("hetero",),),
        ),
        (
            ("--frontier",),
            preset("narrow"),
            "runs/frontier-narrow",
            (ASSIGNMENTS, ("gram", "dual_ascent")),
        ),
        (
            ("--frontier", "--preset", "gpt2-small", "--solver", "gram", "--optimizers", "dgram"),
            preset("gpt2-small"),
            "runs/frontier-gpt2-small",
            (("dgram",), ("gram",)),
        ),
    ],
    ids=["demo", "gram", "faithful", "mine", "frontier", "frontier of GPT-2 small"],
)
def test_which_study_a_command_starts(
    studies: list[tuple], arguments: tuple, config: Run, folder: str, rest: tuple
) -> None:
    main(["manifolds", *map(str, arguments)])
    assert studies == [(config, Path(folder), *rest)]


@pytest.mark.parametrize(
    ("arguments", "name", "preset_name", "changes", "folder"),
    [
        ((), "run_sel", "tiny", {}, "runs/sel-tiny"),
        (("--preset", "paper", "--dir", "mine"), "run_sel", "paper", {}, "mine"),
        (("--calibrate",), "run_calibration", "tiny", {}, "runs/sel-calibration-tiny"),
        (("--steps", 50), "run_sel", "tiny", {"steps": 50}, "runs/sel-tiny"),
    ],
    ids=["tiny", "paper", "calibration", "short"],
)
def test_which_study_of_sel_a_command_starts(
    studies: list[tuple], arguments: tuple, name: str, preset_name: str, changes: dict, folder: str
) -> None:
    main(["sel", *map(str, arguments)])
    study = SEL_PRESETS[preset_name]
    assert studies == [(name, replace(study, base=replace(study.base, **changes)), Path(folder))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("manifolds", "--optimizers", "adamw", "sphere"),
            "unknown assignment 'sphere': choose one of none,",
        ),
        (("manifolds", "--frontier", "--optimizers", "adamw"), "adamw has no rate of Muon's to sweep"),
        (("manifolds", "--corpus", "/nowhere"), "no corpus at /nowhere: give a text file"),
        (("manifolds", "--steps", "5"), "warmup_steps 20 must be less than steps 5"),
        (
            ("train", "--dir", "unused", "tiny", "--model.heads", "3"),
            "width 128 is not divisible by model.heads 3",
        ),
        (("train", "--dir", "unused", "tiny", "--model.vocab-size", "99"), "needs model.vocab_size of 256"),
        (("report", "/nowhere"), "/nowhere is not a directory"),
    ],
    ids=["assignment", "frontier", "corpus", "steps", "heads", "vocabulary", "report"],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in shown(capsys, *arguments, code=2)
    assert not Path("unused").exists()
