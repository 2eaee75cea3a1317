"""The command line, as a person types it: runs, help, and bad input without a traceback."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main

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
    assert all(command in overview for command in ("manifolds", "train", "report"))
    assert "--preset {demo,tiny,gpt2-small}" in shown(capsys, "manifolds", "--help", code=0)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("manifolds", "--optimizers", "adamw", "sphere"),
            "unknown assignment 'sphere': choose one of none,",
        ),
        (("manifolds", "--corpus", "/nowhere"), "no corpus at /nowhere: give a text file"),
        (("manifolds", "--steps", "5"), "warmup_steps 20 must be less than steps 5"),
        (
            ("train", "--dir", "unused", "tiny", "--model.heads", "3"),
            "width 128 is not divisible by model.heads 3",
        ),
        (("train", "--dir", "unused", "tiny", "--model.vocab-size", "99"), "needs model.vocab_size of 256"),
        (("report", "/nowhere"), "/nowhere is not a directory"),
    ],
    ids=["assignment", "corpus", "steps", "heads", "vocabulary", "report"],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in shown(capsys, *arguments, code=2)
    assert not Path("unused").exists()
