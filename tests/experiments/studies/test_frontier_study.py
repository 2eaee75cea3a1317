"""The frontier, with a trainer that only writes what one would, and once with the real one."""

import contextlib
import functools
import io
import json
import math
import random
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.config import Data, Model, Optimizer, Run, to_dict
from experiments.corpus import Corpus
from experiments.errors import InputError
from experiments.studies import named_runs
from experiments.studies.frontier import report as frontier_report
from experiments.studies.frontier import study
from experiments.studies.frontier.stability import Frontier, unigram_entropy
from experiments.studies.frontier.trials import read_trials, summarize
from experiments.train import Result

MATRICES = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
# The largest stable rate of each sweep, beyond which Stiefel learns nothing and the others diverge; the best
# loss is 1 at 0.04 for all, and an octave costs 0.06.
LARGEST = {
    ("none", "gram"): 0.08,
    ("stiefel", "gram"): math.inf,
    ("stiefel", "dual_ascent"): 0.32,
    ("dgram", "gram"): 0.005,
    ("dgram", "dual_ascent"): 0.0,
}
CAP = 10.24


def make_config(folder: Path) -> Run:
    path = folder / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["def", "return", "self", "(x)"], k=10_000)))
    return Run(
        model=Model(context=16, layers=2, heads=2, width=16),
        data=Data(corpus=str(path), batch_size=4, eval_batches=2, probe_sequences=2),
        optimizer=Optimizer(warmup_steps=0, solver_iterations=2),
        steps=6,
        eval_every=3,
        checkpoint_every=6,
        log_every=2,
    )


def eval_line(step: int, rate: float) -> dict:
    """Singular values grow with the rate and the step, more in the attention's c_proj and the MLP's c_fc."""
    size = 1 + rate * step
    sigma = dict(zip(MATRICES, (size, 2 * size, 3 * size, size), strict=True))
    return {
        "kind": "eval",
        "step": step,
        "loss": 2.0,
        "attention": {"max_logit": [size, 5 * size], "saturated": [0.0, min(1.0, rate * step)]},
        "weights": {name: {"sigma_max": [0.5, value]} for name, value in sigma.items()},
    }


class FakeTrainer:
    """Stands for `train`: a run ends as LARGEST says, at once, and is kept like a real one."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def __call__(self, config: Run, run_dir: Path, *, corpus: Corpus, progress: bool) -> Result:
        if (run_dir / "result.json").exists():
            return Result(**json.loads((run_dir / "result.json").read_text()))
        self.trained.append(run_dir.name)
        optimizer = config.optimizer
        rate, stable = optimizer.muon_learning_rate, LARGEST[optimizer.name, optimizer.solver]
        loss = 1 + 0.06 * abs(math.log2(rate / 0.04))
        result = Result("finished", 6, "", loss, loss)
        if rate > stable and optimizer.name == "stiefel":
            result = Result("finished", 6, "", 4.0, 2.0)
        elif rate > stable:
            result = Result("diverged", 3, "", 9.0, 2.0)
        run_dir.mkdir(parents=True)
        facts = {
            "config": to_dict(config),
            "versions": {"jax": "0.0.1"},
            "corpus": {"fingerprint": corpus.fingerprint, "description": "made-up <text>"},
        }
        lines = [eval_line(step, rate) for step in (0, 3, 6) if step <= result.step]
        (run_dir / "config.json").write_text(json.dumps(facts))
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run_dir / "result.json").write_text(json.dumps(asdict(result)))
        return result


@pytest.fixture
def config(tmp_path: Path) -> Run:
    return make_config(tmp_path)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    """In place of the real one; and no report is made."""
    trainer = FakeTrainer()
    monkeypatch.setattr(named_runs, "train", trainer)
    monkeypatch.setattr(study, "write_report", lambda folder: folder / "report.html")
    return trainer


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A study's folder and what making it printed; tests must not change it."""
    folder, out = tmp_path_factory.mktemp("frontier"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(named_runs, "train", FakeTrainer())
        assert run(make_config(folder), folder) == folder / "report.html"
    return folder, out.getvalue()


def run(config: Run, study_dir: Path) -> Path:
    return study.run_frontier(config, study_dir, ("none", "stiefel", "dgram"), progress=False)


def names(sweep: str, *rates: str) -> list[str]:
    return [f"{sweep}-lr{rate}" for rate in rates]


def test_runs_of_the_sweeps(config: Run, tmp_path: Path, trainer: FakeTrainer) -> None:
    run(config, tmp_path / "study")
    up = ("0.02", "0.04", "0.08", "0.16", "0.32", "0.64", "1.28", "2.56", "5.12", "10.24")
    down = ("0.02", "0.01", "0.005", "0.0025", "0.00125", "0.000625", "0.0003125")
    assert (
        trainer.trained
        == [
            *names("none-gram", *up[:4]),  # the unconstrained step has one solver
            *names("stiefel-gram", *up),
            *names("stiefel-dual_ascent", *up[:6]),
            *names("dgram-gram", *down[:4]),
            *names("dgram-dual_ascent", *down),
        ]
    )


def test_only_what_is_missing_is_trained(config: Run, tmp_path: Path, trainer: FakeTrainer) -> None:
    folder = tmp_path / "study"
    run(config, folder)
    trainer.trained.clear()
    run(config, folder)
    assert not trainer.trained
    shutil.rmtree(folder / "stiefel-gram-lr5.12")
    run(config, folder)
    assert trainer.trained == ["stiefel-gram-lr5.12"]


def test_configurations_differ_in_nothing_else(config: Run, tmp_path: Path, trainer: FakeTrainer) -> None:
    run(config, tmp_path)
    for name, solver, retraction in (("gram", "gram", "frame"), ("dual_ascent", "dual_ascent", "svd")):
        stored = json.loads((tmp_path / f"stiefel-{name}-lr0.08" / "config.json").read_text())["config"]
        changes = {
            "name": "stiefel",
            "solver": solver,
            "dgram_retraction": retraction,
            "muon_learning_rate": 0.08,
        }
        expected = replace(config, optimizer=replace(config.optimizer, **changes))
        assert stored == json.loads(json.dumps(to_dict(expected)))


def test_results_are_the_hand_computed_ones(reported: tuple[Path, str]) -> None:
    results = json.loads((reported[0] / "results.json").read_text())
    assert results["notes"] == []
    rows = {(row["assignment"], row["solver"]): row for row in results["sweeps"]}
    assert list(rows) == [
        ("none", "gram"),
        ("stiefel", "gram"),
        ("dgram", "gram"),
        ("stiefel", "dual_ascent"),
        ("dgram", "dual_ascent"),
    ]
    expected = {  # largest rate, why no larger, best loss, its rate, largest rate within 0.1 of it
        ("none", "gram"): (0.08, "diverged at step 3 at 0.16", 1.0, 0.04, 0.08),
        ("stiefel", "gram"): (CAP, "cap reached", 1.0, 0.04, 0.08),
        ("stiefel", "dual_ascent"): (0.32, "above the unigram entropy at 0.64", 1.0, 0.04, 0.08),
        ("dgram", "gram"): (0.005, "diverged at step 3 at 0.01", 1.18, 0.005, 0.005),
        ("dgram", "dual_ascent"): (None, "diverged at step 3 at 0.0003125", None, None, None),
    }
    for key, (largest, end, best, best_rate, close) in expected.items():
        row = rows[key]
        assert (row["end"], row["close"]) == (end, pytest.approx(close) if close else None)
        assert (row["largest"] and row["largest"]["rate"]) == largest
        assert (row["best"] and row["best"]["rate"]) == best_rate
        assert (row["best"] and row["best"]["validation_loss"]) == (best and pytest.approx(best))
    size = 1 + 6 * 0.08
    at_largest = rows["none", "gram"]["largest"]
    assert at_largest["sigma_max_attention"] == pytest.approx(2 * size)
    assert at_largest["sigma_max_mlp"] == pytest.approx(3 * size)
    assert at_largest["max_logit"] == pytest.approx(5 * size)
    assert at_largest["saturated"] == pytest.approx(0.24)  # the mean of 0 and 0.48


def test_report_holds_everything(reported: tuple[Path, str]) -> None:
    folder, printed = reported
    page, results = (folder / "report.html").read_text(), json.loads((folder / "results.json").read_text())
    row = "| all-DGram | gram | 1.1800 | 0.005 | 0.005 | 0.005 | diverged at step 3 at 0.01 | 2.06 |"
    assert row in printed and row in (folder / "results.md").read_text()
    assert "none-gram-lr0.08: finished, validation loss 1.0600" in printed
    assert "none-gram-lr0.16: diverged, validation loss 9.0000" in printed

    text = re.sub(r'src="data:image/png;base64,[^"]+"', "", page)
    assert not re.search(r"\b(src|href|srcset|data|action)\s*=|<script|<link|@import|url\(|http", text)
    assert "$" not in text and "made-up &lt;text&gt;" in text
    held_out = (folder / "corpus.txt").read_bytes()[-1000:]
    assert results["frontier"]["unigram_entropy"] == pytest.approx(
        unigram_entropy(np.frombuffer(held_out, np.uint8)), abs=0.01
    )
    assert f"{results['frontier']['unigram_entropy']:.3f} nats" in " ".join(text.split())
    images = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)">', page)
    assert len(images) == len(set(images)) == len(list(folder.glob("*.png"))) == 10
    assert {"Final loss: gram", "Final loss: dual_ascent", "Saturated rows: gram"} <= {a for a, _ in images}
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 100, path.name


def test_a_sweep_that_was_stopped(reported: tuple[Path, str], tmp_path: Path) -> None:
    """A run under way is in the table of all runs alone, and no rate is called the largest for good."""
    folder = shutil.copytree(reported[0], tmp_path / "stopped")
    for rate in ("0.64", "1.28", "2.56", "5.12", "10.24"):
        (folder / f"stiefel-gram-lr{rate}" / "result.json").unlink()
    _, trials, frontier = read_trials(folder)
    (row,) = (
        row for row in summarize(trials, frontier) if (row.assignment, row.solver) == ("stiefel", "gram")
    )
    assert row.largest is not None and row.largest.rate == 0.32 and row.end == "sweep not ended"
    assert [trial.status for trial in trials if trial.verdict is None] == ["running, step 6 of 6"] * 5


def test_other_differences_are_noted(reported: tuple[Path, str], tmp_path: Path) -> None:
    folder = shutil.copytree(reported[0], tmp_path / "changed")
    path = folder / "stiefel-gram-lr0.08" / "config.json"
    facts = json.loads(path.read_text())
    facts["config"]["seed"] = 3
    path.write_text(json.dumps(facts))
    frontier_report.write_report(folder)
    (note,) = json.loads((folder / "results.json").read_text())["notes"]
    assert "stiefel-gram-lr0.08 differ in more than assignment, solver and rate: config.seed: 0 -> 3" in note


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("none", "adamw"), "adamw has no rate of Muon's"),
        (("none", "sphere"), "unknown assignment 'sphere'"),
        ((), "at least one assignment"),
    ],
)
def test_bad_input_ends_it_before_the_first_run(
    config: Run, tmp_path: Path, trainer: FakeTrainer, assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        study.run_frontier(config, tmp_path / "study", assignments, progress=False)
    assert not (tmp_path / "study").exists() and not trainer.trained


def test_with_the_real_trainer(config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six updates beat no unigram model, so the sweep goes down; a second call trains nothing."""
    monkeypatch.setattr(study, "Frontier", functools.partial(Frontier, doublings=1, halvings=1))
    overflowing = replace(config, optimizer=replace(config.optimizer, muon_learning_rate=1e30))
    report = study.run_frontier(overflowing, tmp_path / "study", ("none",), progress=False)
    trials = json.loads((tmp_path / "study" / "results.json").read_text())["trials"]
    assert [trial["rate"] for trial in trials] == [5e29, 1e30]
    assert all("non-finite at step" in trial["status"] or "diverged" in trial["status"] for trial in trials)
    before = report.read_bytes()
    monkeypatch.setattr("experiments.train.make_program", None)  # nothing may be built
    study.run_frontier(overflowing, tmp_path / "study", ("none",), progress=False)
    assert report.read_bytes() == before
