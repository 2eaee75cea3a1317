"""The SEL study's report, from stored runs whose curves are straight lines: nothing is trained."""

import json
import math
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.__main__ import main
from experiments.config import Data, Model, Optimizer, Run, to_dict
from experiments.errors import InputError
from experiments.studies import named_runs
from experiments.studies.sel import calibration, calibration_report
from experiments.studies.sel import report as sel_report
from experiments.studies.sel import study as study_module
from experiments.studies.sel.overhead import Overhead
from experiments.studies.sel.plan import Cell, SelStudy
from experiments.studies.sel.results import read_study, step_ratio, steps_to
from experiments.train import Result

STEPS = 40
MATRICES = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
STUDY = SelStudy(
    base=Run(
        model=Model(context=16, layers=1, heads=2, width=16),
        data=Data(batch_size=4),
        optimizer=Optimizer(name="adamw", warmup_steps=0),
        steps=STEPS,
        eval_every=10,
    ),
    widths=(16, 32),
    depths=(1,),
    head_size=8,
    rates=(1e-2, 2e-2, 4e-2),
    seeds=2,
    ablation=(16, 1),
    curvatures=(0.4, 0.8),
    calibration_rates=(1e-2, 2e-2),
)


def write_run(config: Run, run_dir: Path, **_: object) -> Result:
    """Validation loss falls from 5 on a line: by 2 for AdamW, by 4 for SEL at width 16 and by 1 at width 32.

    Seed 1's falls by a tenth more, and each octave from a rate of 0.02 takes a tenth away; without the linear
    path it diverges.
    """
    sel = config.sel
    fall = (4 if config.model.width == 16 else 1) if sel.on else 2
    fall *= 1 + 0.1 * config.seed - 0.1 * abs(math.log2(config.optimizer.learning_rate / 0.02))
    fall *= 1 if sel.annealed else 0.9
    fall *= 1.05 if sel.curvature == 0.8 else 1
    lines = [
        {
            "kind": "eval",
            "step": step,
            "loss": 5 - fall * step / STEPS,
            "attention": {},
            "weights": {
                name: {"kurtosis": [3.0, 3.0 + step / STEPS * (1 + sel.on)]}
                | ({f"size_{q}": [1.0, 1.0 + step] for q in ("0.5", "0.9", "0.99", "0.999", "1")})
                for name in MATRICES
            },
        }
        for step in range(0, STEPS + 1, 10)
    ]
    result = Result("finished", STEPS, "", lines[-1]["loss"], lines[-1]["loss"])
    if not sel.linear:
        result, lines = Result("diverged", 10, "", 9.0, 5.0), lines[:2]
    facts = {
        "config": to_dict(config),
        "versions": {"jax": "0.0.1"},
        "corpus": {"fingerprint": "abc", "description": "made-up <text>"},
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(json.dumps(facts))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "result.json").write_text(json.dumps(asdict(result)))
    return result


def write_overhead(baseline: Run, sel: Run, corpus: object, path: Path) -> None:
    assert (baseline.sel.on, sel.sel.on) == (False, True)
    times = {"baseline_seconds": [1.0, 1.0, 1.0], "sel_seconds": [1.0, 1.25, 2.0]}
    path.write_text(json.dumps(asdict(Overhead(pairs=24, **times, ratio=[1.0, 1.25, 2.0]))))


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_runs, "train", write_run)
        patch.setattr(named_runs, "load", lambda *_, **__: None)
        patch.setattr(study_module, "overhead", write_overhead)
        yield


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory, patched: None) -> Path:
    """A study's folder; tests must not change it."""
    folder = tmp_path_factory.mktemp("sel")
    assert study_module.run_sel(STUDY, folder, progress=False) == folder / "report.html"
    return folder


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ([5, 4, 3, 2], 3.5, 15),
        ([5, 4, 3, 2], 3, 20),
        ([5, 4, 3, 2], 1.9, None),
        ([5, 4, 3, 2], 6, 0),
        ([5, 3, 4, 2], 3.5, 7.5),  # the first time
        ([5, np.nan, 3, 2], 4, 10),
        ([], 4, None),
    ],
)
def test_steps_to_a_loss(losses: list, target: float, expected: float | None) -> None:
    curve = np.arange(len(losses)) * 10.0, np.array(losses, dtype=float)
    assert steps_to(curve, target) == expected


@pytest.mark.parametrize(
    ("sel", "expected"),
    [
        ([5, 3, 2], 2.0),  # the baseline's 3 at 10 of 20 steps
        ([5, 4, 3], 1.0),
        ([5, 4.5, 4], 0.5),  # never: the baseline is at 4 after 10
        ([5, 4, np.nan], None),
        ([6, 5.5, 5.5], 0.0),
        ([2, 2, 2], None),  # there before the first step: no ratio
    ],
)
def test_ratio_of_steps(sel: list, expected: float | None) -> None:
    steps = np.array([0.0, 10.0, 20.0])
    assert step_ratio((steps, np.array([5.0, 4.0, 3.0])), (steps, np.array(sel, dtype=float))) == expected


def test_results_are_the_hand_computed_ones(reported: Path) -> None:
    results = json.loads((reported / "results.json").read_text())
    assert results["notes"] == []
    narrow, wide = results["cells"]
    assert (narrow["cell"], narrow["baseline_rate"], narrow["sel_rate"]) == ("w16-d1", 0.02, 0.02)
    assert narrow["baseline_loss"] == pytest.approx((3.0 + 2.8) / 2)
    assert narrow["sel_loss"] == pytest.approx((1.0 + 0.6) / 2)
    assert narrow["difference"] == pytest.approx(-2.1)
    assert narrow["step_ratios"] == pytest.approx([2.0, 2.0])
    assert narrow["overhead"] == [1.0, 1.25, 2.0]
    assert narrow["time_ratio"] == pytest.approx(2 / 1.25)
    assert wide["step_ratios"] == pytest.approx([0.5, 0.5])

    ablations = {row["method"]: row for row in results["ablations"]}
    assert list(ablations)[0] == "sel" and len(ablations) == 5
    assert ablations["sel-fixed-multipliers"]["difference"] == pytest.approx(0.1 * (4 + 4.4) / 2)
    failed = ablations["sel-no-linear-path"]
    assert (failed["loss"], failed["difference"], failed["losses"]) == (None, None, [])
    assert failed["statuses"] == ["diverged at step 10"] * 2

    weights = {(row["cell"], row["method"]): row for row in results["weights"]}
    assert weights["w16-d1", "adamw"]["kurtosis"] == [3.0, 3.5]  # the mean of two layers
    assert weights["w16-d1", "sel"]["kurtosis"] == [3.0, 4.0]
    assert weights["w32-d1", "sel"]["sizes"]["0.999"] == [1.0, 21.0]
    assert len(results["trials"]) == len(list(reported.glob("*/config.json"))) == 2 * 2 * 4 + 8


def test_report_holds_everything(reported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in reported.iterdir() if path.is_file()}
    main(["report", str(reported)])
    row = "| w16-d1 | 2.9000 | 0.02 | 0.8000 | 0.02 | -2.1000 | 2.000 | 2.000 to 2.000 | 1.250 |"
    assert row in capsys.readouterr().out and row in (reported / "results.md").read_text()
    assert {path: path.read_bytes() for path in before} == before  # from stored runs, and each time the same

    page = (reported / "report.html").read_text()
    text = re.sub(r'src="data:image/png;base64,[^"]+"', "", page)
    assert not re.search(r"\b(src|href|srcset|data|action)\s*=|<script|<link|@import|url\(|http", text)
    assert "$" not in text and "made-up &lt;text&gt;" in text
    images = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)">', page)
    assert len(images) == len(set(images)) == len(list(reported.glob("*.png"))) == 3 * 2 + 2 + 8
    for path in reported.glob("*.png"):
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 100, path.name


def test_a_study_that_was_stopped(reported: Path, tmp_path: Path) -> None:
    """What is there is reported, and what is not is not made up."""
    folder = tmp_path / "stopped"
    shutil.copytree(reported, folder, ignore=shutil.ignore_patterns("*-sel*", "w32*", "overhead*"))
    (folder / "w16-d1-adamw-lr0.02-s1" / "result.json").unlink()
    sel_report.write_report(folder)
    results = json.loads((folder / "results.json").read_text())
    narrow, wide = results["cells"]
    assert (narrow["baseline_loss"], narrow["sel_loss"], narrow["step_ratio"]) == (
        pytest.approx(3),
        None,
        None,
    )
    assert (narrow["overhead"], wide["baseline_rate"]) == (None, None)
    assert results["ablations"] == []


def test_runs_in_the_order_of_the_tables(reported: Path) -> None:
    study, runs = read_study(reported)
    assert study == STUDY
    assert [trial.cell for trial in runs] == sorted(trial.cell for trial in runs)
    assert [trial.name for trial in runs] == [run.name for run in runs.values()]
    assert next(iter(runs)).cell == Cell(16, 1)


def test_a_damaged_time_is_named(reported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reported, tmp_path / "damaged")
    (folder / "overhead-w16-d1.json").write_text("{}")
    with pytest.raises(InputError, match="overhead-w16-d1.json lacks pairs"):
        sel_report.format_table(folder)


def test_a_calibration(tmp_path: Path, patched: None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "calibration"
    report = calibration.calibrate(STUDY, folder, progress=False)
    capsys.readouterr()
    main(["report", str(folder)])
    assert "| 0.8 | 0.02 | tripled | 3.8975 | 3.9500, 3.8450 | finished |" in capsys.readouterr().out
    rows = calibration_report.read_rows(folder)
    assert [(row.annealing, row.curvature, row.rate) for row in rows] == [
        *(("off", curvature, rate) for curvature in (0.4, 0.8) for rate in (0.01, 0.02)),
        *((annealing, 0.8, 0.02) for annealing in ("tenfold", "raised", "tripled")),
    ]
    best = calibration_report.best_row(rows)
    assert best is not None and (best.curvature, best.rate) == (0.8, 0.02)
    text = re.sub(r'src="data:image/png;base64,[^"]+"', "", report.read_text())
    assert "$" not in text and "tripled: e 3 to 0.3, m 0.3 to 3" in text
    assert json.loads((folder / "results.json").read_text())["notes"] == []
