"""The SEL study: its rules in closed form, its runs with a trainer that only counts, and the real one."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import train as training
from experiments.config import Data, Model, Optimizer, Run, Sel
from experiments.errors import InputError
from experiments.studies import named_runs
from experiments.studies.sel import calibration
from experiments.studies.sel import study as study_module
from experiments.studies.sel.overhead import Overhead, read_overhead
from experiments.studies.sel.plan import (
    ABLATIONS,
    ANNEALINGS,
    SEL_PRESETS,
    Cell,
    SelStudy,
    Trial,
)
from experiments.studies.sweeps import best_rate, beyond_the_edge, sweep
from experiments.train import Result


def make_study(folder: Path, **changes) -> SelStudy:
    path = folder / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["def", "return", "self", "(x)"], k=10_000)))
    base = Run(
        model=Model(context=16, layers=1, heads=2, width=16),
        data=Data(corpus=str(path), batch_size=4, eval_batches=2, probe_sequences=2),
        optimizer=Optimizer(name="adamw", warmup_steps=2),
        steps=6,
        eval_every=2,
        checkpoint_every=2,
        log_every=2,
    )
    settings = {
        "widths": (16, 32),
        "depths": (1,),
        "head_size": 8,
        "rates": (1e-2, 2e-2),
        "extensions": 1,
        "seeds": 2,
        "ablation": (16, 1),
        "curvatures": (0.4, 0.8),
        "calibration_rates": (1e-2, 2e-2),
    }
    return SelStudy(base=base, **settings | changes)


class CountingTrainer:
    """Stands for `train`: AdamW is best at 0.02, SEL at 0.08, and SEL at width 32 never ends well."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def __call__(self, config: Run, run_dir: Path, *, corpus: object, progress: bool) -> Result:
        self.trained.append(run_dir.name)
        if config.sel.on and config.model.width == 32:
            return Result("diverged", 4, "", 9.0, 5.0)
        best = 0.08 if config.sel.on else 0.02
        loss = 2 + abs(math.log2(config.optimizer.learning_rate / best)) + abs(config.sel.curvature - 0.8)
        return Result("finished", 6, "", loss, loss)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> CountingTrainer:
    """In place of the real one; nothing is timed, and no report is made."""
    trainer = CountingTrainer()
    monkeypatch.setattr(named_runs, "train", trainer)
    monkeypatch.setattr(study_module, "overhead", lambda *_: None)
    for module in (study_module, calibration):
        monkeypatch.setattr(module, "write_report", lambda folder: folder / "report.html")
        monkeypatch.setattr(module, "format_table", lambda folder: "")
    return trainer


@pytest.mark.parametrize(
    ("losses", "best", "beyond"),
    [
        ({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}, 2.0, None),
        ({1.0: 1.0, 2.0: 2.0, 4.0: 2.5}, 1.0, 0.5),
        ({1.0: 3.0, 2.0: 2.0, 4.0: 1.5}, 4.0, 8.0),
        ({4.0: None, 1.0: 3.0, 2.0: 2.0}, 2.0, None),  # the end is known: it fails
        ({1.0: None, 2.0: None}, None, 0.5),
        ({2.0: 1.0, 1.0: 1.0, 4.0: 2.0}, 1.0, 0.5),
    ],
    ids=["inside", "low", "high", "failed", "none", "equal"],
)
def test_best_rate_and_the_next_one(losses: dict, best: float | None, beyond: float | None) -> None:
    assert best_rate(losses) == best
    assert beyond_the_edge(losses) == beyond


@pytest.mark.parametrize(
    ("best", "extensions", "tried"),
    [
        (2.0, 2, [1, 2, 4]),
        (8.0, 2, [1, 2, 4, 8, 16]),
        (1e6, 2, [1, 2, 4, 8, 16]),
        (0.5, 2, [1, 2, 4, 0.5, 0.25]),
        (8.0, 0, [1, 2, 4]),
    ],
)
def test_a_sweep_follows_the_best_rate(best: float, extensions: int, tried: list[float]) -> None:
    losses = sweep((1.0, 2.0, 4.0), extensions, lambda rate: abs(math.log2(rate / best)))
    assert list(losses) == tried


def test_runs_of_a_study(tmp_path: Path, trainer: CountingTrainer, capsys: pytest.CaptureFixture) -> None:
    study = make_study(tmp_path)
    study_module.run_sel(study, tmp_path / "study", progress=False)
    # AdamW's best rate is the grid's upper end, so 0.04 is tried and is no better.
    expected = [f"w16-d1-adamw-lr{rate}-s0" for rate in ("0.01", "0.02", "0.04")]
    expected += ["w16-d1-adamw-lr0.02-s1"]
    expected += [f"w16-d1-sel-lr{rate}" for rate in ("0.01-s0", "0.02-s0", "0.04-s0", "0.04-s1")]
    expected += [f"w32-d1-adamw-lr{rate}" for rate in ("0.01-s0", "0.02-s0", "0.04-s0", "0.02-s1")]
    # No rate holds: half the lowest is tried, and nothing more.
    expected += [f"w32-d1-sel-lr{rate}-s0" for rate in ("0.01", "0.02", "0.005")]
    expected += [f"w16-d1-{name}-lr0.04-s{seed}" for name in ABLATIONS for seed in (0, 1)]
    assert trainer.trained == expected
    assert "w32-d1: no run of sel made all its updates" in capsys.readouterr().out


def test_runs_of_a_calibration(tmp_path: Path, trainer: CountingTrainer) -> None:
    study = make_study(tmp_path, widths=(16,))
    calibration.calibrate(study, tmp_path / "study", progress=False)
    assert trainer.trained == [
        *(f"c{curvature}-lr{rate}-off-s0" for curvature in (0.4, 0.8) for rate in (0.01, 0.02)),
        *(f"c0.8-lr0.02-{name}-s{seed}" for name in ANNEALINGS for seed in (0, 1)),
    ]


def test_trials_differ_in_what_their_name_says(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    cell = Cell(32, 1)
    baseline = study.config(Trial(cell, "adamw", 0.02, 1))
    assert baseline == replace(
        study.base,
        model=replace(study.base.model, width=32, heads=4),
        optimizer=replace(study.base.optimizer, learning_rate=0.02),
        seed=1,
    )

    def sel(method: str) -> Sel:
        config = study.config(Trial(cell, method, 0.02, 1))
        assert replace(config, sel=Sel()) == baseline
        return config.sel

    whole = Sel(on=True)
    assert sel("sel") == whole
    assert sel("sel-no-linear-path") == replace(whole, linear=False)
    assert sel("sel-congruent-start") == replace(whole, start="congruent")
    assert sel("sel-fixed-multipliers") == replace(whole, annealed=False)
    assert sel("sel-fixed-scales") == replace(whole, learnable=False)


def test_presets() -> None:
    tiny, paper = SEL_PRESETS["tiny"], SEL_PRESETS["paper"]
    assert (tiny.widths, tiny.depths, tiny.seeds) == ((64, 128, 192), (2, 4), 2)
    assert (tiny.base.model.context, tiny.base.data.batch_size) == (64, 16)
    assert tiny.middle == Cell(128, 4)
    assert (paper.widths, paper.depths, paper.middle) == ((1024, 2048, 3072), (12, 24, 36), Cell(2048, 24))
    assert (paper.base.data.corpus, paper.base.model.vocab_size) == ("data/openwebtext", 50304)
    assert paper.config(Trial(Cell(3072, 36), "sel", 3e-4, 0)).model.heads == 48
    for study in (tiny, paper):
        assert study.rates == tuple(study.rates[0] * 2**i for i in range(3))
        assert study.base.sel == Sel()


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    study.save(tmp_path / "a", "grid")
    assert SelStudy.load(tmp_path / "a") == (study, "grid")
    study.save(tmp_path / "a", "grid")
    for other, purpose in ((replace(study, seeds=5), "grid"), (study, "calibration")):
        with pytest.raises(InputError, match="holds another study"):
            other.save(tmp_path / "a", purpose)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"purpose": "lunch"}, "purpose 'lunch' is none of grid, calibration"),
        ({"colour": "red"}, "is not a study's plan"),
        ({"base": {}}, "is not a study's plan"),
    ],
)
def test_a_damaged_plan(tmp_path: Path, change: dict, message: str) -> None:
    make_study(tmp_path).save(tmp_path, "grid")
    content = json.loads((tmp_path / "sel.json").read_text())
    (tmp_path / "sel.json").write_text(json.dumps(content | change))
    with pytest.raises(InputError, match=message):
        SelStudy.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": ()}, "at least one of its rates"),
        ({"seeds": 0}, "at least 1 seed"),
        ({"ablation": (64, 1)}, "w64-d1 is not in the grid"),
        ({"widths": (16, 20)}, "width 20 is not a multiple of .* head_size 8"),
        ({"base": Run()}, "cannot have another optimizer"),
    ],
)
def test_impossible_plans(tmp_path: Path, changes: dict, message: str) -> None:
    study = make_study(tmp_path)
    with pytest.raises(InputError, match=message):
        replace(study, **changes)


def test_a_study_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real trainer: stopped within SEL's run, taken up there, and not trained a third time."""
    monkeypatch.setattr(study_module, "ABLATIONS", {})
    study = make_study(tmp_path, widths=(16,), rates=(2e-2,), extensions=0, seeds=1)
    folder, train_batches, asked = tmp_path / "study", training.train_batches, []

    def batches(*arguments, start_step, **settings):
        asked.append(start_step)
        found = train_batches(*arguments, start_step=start_step, **settings)
        for step, tokens in enumerate(found, start_step + 1):
            if len(asked) == 2 and step == 4:
                raise KeyboardInterrupt
            yield tokens

    monkeypatch.setattr(training, "train_batches", batches)
    with pytest.raises(KeyboardInterrupt):
        study_module.run_sel(study, folder, progress=False)
    timed = (folder / "overhead-w16-d1.json").read_bytes()
    report = study_module.run_sel(study, folder, progress=False)
    assert asked == [0, 0, 2]  # AdamW's run; SEL's, and again from its checkpoint
    assert (folder / "overhead-w16-d1.json").read_bytes() == timed

    measured = read_overhead(folder / "overhead-w16-d1.json")
    assert isinstance(measured, Overhead) and measured.pairs >= 20
    assert all(np.diff(measured.ratio) >= 0) and measured.ratio[0] > 0
    (cell,) = json.loads((folder / "results.json").read_text())["cells"]
    assert cell["baseline_loss"] < 5.5 and cell["sel_loss"] < 5.5  # log 256 = 5.545
    lines = [
        json.loads(line) for line in (folder / "w16-d1-sel-lr0.02-s0/metrics.jsonl").read_text().splitlines()
    ]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert ["size_0.5" in line["weights"]["mlp/c_fc"] for line in evaluations] == [True, False, False, True]

    monkeypatch.setattr(training, "make_program", None)  # nothing may be built
    monkeypatch.setattr("experiments.studies.sel.overhead.make_train_step", None)
    monkeypatch.setattr(study_module, "write_report", lambda folder: folder / "report.html")
    assert study_module.run_sel(study, folder, progress=False) == report
