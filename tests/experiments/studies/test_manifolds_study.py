"""The study of manifolds, end to end on a small model: an unstable run is a result, and the rest go on."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config import Data, Model, Optimizer, Run
from experiments.errors import InputError
from experiments.studies.manifolds import study as manifolds


@pytest.fixture
def config(tmp_path: Path) -> Run:
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["def", "return", "self", "(x)"], k=10_000)))
    return Run(
        model=Model(context=16, layers=2, heads=2, width=16),
        data=Data(corpus=str(path), batch_size=4, eval_batches=2, probe_sequences=2),
        # Muon at this rate overflows within a few steps, while Stiefel weights cannot grow.
        optimizer=Optimizer(warmup_steps=0, muon_learning_rate=1e30, solver_iterations=2),
        steps=6,
        eval_every=3,
        checkpoint_every=3,
        log_every=2,
    )


def test_runs_end_each_its_own_way(config: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study"
    report = manifolds.run_study(config, study, ("adamw", "none", "stiefel"), progress=False)
    results = {
        name: json.loads((study / name / "result.json").read_text()) for name in ("adamw", "none", "stiefel")
    }
    assert results["adamw"]["status"] == results["stiefel"]["status"] == "finished"
    assert results["none"]["status"] in ("non-finite", "diverged")
    printed = capsys.readouterr().out
    assert f"none: {results['none']['status']} at step {results['none']['step']}" in printed
    assert "all-Stiefel" in printed and report == study / "report.html"

    lines = [json.loads(line) for line in (study / "stiefel" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert max(evaluations[-1]["weights"]["mlp/c_fc"]["violation"]) < 1e-3
    assert "solver" not in evaluations[0]  # nothing has been solved yet
    solver = evaluations[-1]["solver"]
    assert set(solver) == {"attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj"}
    assert solver["attn/c_proj"] == {"iterations": [0, 0], "gap": [pytest.approx(0, abs=1e-2)] * 2}
    assert all(len(matrix["iterations"]) == len(matrix["gap"]) == 2 for matrix in solver.values())

    before = report.read_bytes()
    manifolds.run_study(config, study, ("adamw", "none", "stiefel"), progress=False)
    assert report.read_bytes() == before  # nothing was trained again


def test_an_unknown_name_ends_the_study_before_its_first_run(config: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown assignment 'sphere'"):
        manifolds.run_study(config, tmp_path / "study", ("adamw", "sphere"), progress=False)
    assert not (tmp_path / "study").exists()


def test_study_names_the_papers_five_and_adamw() -> None:
    assert manifolds.OPTIMIZERS == ("adamw", "none", "stiefel", "dgram", "hetero", "hetero-inv")
    base = Run()
    assert {
        replace(base.with_optimizer(name), optimizer=base.optimizer) for name in manifolds.OPTIMIZERS
    } == {base}
