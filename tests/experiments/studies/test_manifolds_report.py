"""The report on made-up runs: every number in the tables is worked out by hand here."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import files
from experiments.errors import InputError
from experiments.studies.manifolds import report
from tests.experiments.stored_runs import CONFIG, EVAL_LOSSES, write_run


def write_study(study_dir: Path) -> Path:
    for name in EVAL_LOSSES:
        write_run(study_dir, name, tail='{"kind": "train", "st' if name == "hetero" else "")
    (study_dir / "notes").mkdir()
    return study_dir


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with its report; tests must not change it."""
    study_dir = write_study(tmp_path_factory.mktemp("report") / "study")
    assert report.write_report(study_dir) == study_dir / "report.html"
    return study_dir


def test_results_are_the_hand_computed_ones(study: Path) -> None:
    rows = {row["run"]: row for row in json.loads((study / "results.json").read_text())["runs"]}
    assert list(rows) == [*EVAL_LOSSES]  # the paper's order, then the user's own
    expected = {
        # name: label, attention, MLP, final, best, difference, paper, logit, tokens/s
        "adamw": ("AdamW", None, None, 3.0, 3.0, 0.1, None, 3.2, 1030),
        "none": ("unconstrained Muon", "none", "none", 2.9, 2.9, 0.0, 3.3855, 3.2, 1030),
        "stiefel": ("all-Stiefel", "Stiefel", "Stiefel", 2.875, 2.85, -0.025, 3.3679, 3.2, 1030),
        "dgram": ("all-DGram", "DGram", "DGram", 9.5, 3.3, None, "unstable", 8.0, 1015),
        "hetero": ("hetero", "Stiefel", "DGram", None, 3.1, None, 3.3544, 2.4, 1010),
        "hetero-inv": ("hetero-inv", "DGram", "Stiefel", None, 3.9, None, "unstable", None, 1005),
        "my <own> run": ("my <own> run", "Stiefel", "DGram", 3.125, 3.125, 0.225, None, 3.2, 1030),
    }
    keys = (
        "label",
        "attention",
        "mlp",
        "validation_loss",
        "best_validation_loss",
        "difference",
        "paper",
        "max_logit",
        "tokens_per_second",
    )
    for name, values in expected.items():
        for key, value in zip(keys, values, strict=True):
            found = rows[name][key]
            assert found == (pytest.approx(value, abs=1e-12) if isinstance(value, float) else value), (
                name,
                key,
            )
    assert {name: row["status"] for name, row in rows.items()} == {
        "adamw": "finished",
        "none": "finished",
        "stiefel": "finished",
        "dgram": "diverged at step 30",
        "hetero": "running, step 20 of 60",
        "hetero-inv": "non-finite at step 17",
        "my <own> run": "finished",
    }
    assert rows["hetero"]["config"]["optimizer"]["name"] == "hetero"
    assert rows["hetero"]["corpus"]["fingerprint"] == "c0ffee"


def test_markdown(study: Path) -> None:
    head, rule, *rows = (study / "results.md").read_text().split("\n\n")[0].splitlines()
    assert {line.count("|") for line in (head, rule, *rows)} == {11}
    assert (
        "| all-Stiefel | Stiefel | Stiefel | 2.8750 | 2.8500 | finished | -0.0250 | 3.3679 | 3.2 | 1,030 |"
        in rows
    )
    assert (
        "| hetero-inv | DGram | Stiefel | – | 3.9000 | non-finite at step 17 | – | unstable | – | 1,005 |"
        in rows
    )
    text = (study / "results.md").read_text()
    assert "another scale and corpus" in text and "no error bars" in text


def test_html_holds_everything_and_loads_nothing(study: Path) -> None:
    page = (study / "report.html").read_text()
    text = re.sub(r'src="data:image/png;base64,[^"]+"', "", page)
    assert not re.search(r"\b(src|href|srcset|data|action)\s*=", text)
    assert not re.search(r"<script|<link|@import|url\(|http", text)
    assert "$" not in text
    images = re.findall(r'<img alt="[^"]+" src="data:image/png;base64,([^"]+)">', page)
    assert len(images) == len(set(images)) == len(list(study.glob("*.png"))) == page.count("How to read") + 8
    assert "my &lt;own&gt; run" in page and "<own>" not in page
    assert "made-up &lt;text&gt;" in page and "c0ffee" in page and "jax 0.0.1, flax 0.0.2" in page
    assert "running, step 20 of 60" in page
    assert "step: gram; DGram's retraction: frame." in page
    assert "hetero: the last line of metrics.jsonl was cut short" in page
    assert "(2 layers, 4 heads, width 32, context 16 tokens) for 60 steps" in page
    best = re.findall(r"<tr class=best>.*", page)
    assert len(best) == 1 and "all-Stiefel" in best[0]


def test_figures_are_not_blank(study: Path) -> None:
    paths = sorted(study.glob("*.png"))
    assert {"validation_loss.png", "softmax_entropy.png", "constraint_violation.png"} <= {
        path.name for path in paths
    }
    for path in paths:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
            assert "Software" not in image.info
        assert pixels.shape[0] > 500 and pixels.shape[1] > 800
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100, path.name
    assert not [path for path in study.iterdir() if path.name.startswith(".")], "a temporary file was left"


def test_rebuilding_gives_the_same_bytes(study: Path) -> None:
    files = [path for path in study.iterdir() if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    report.write_report(study)
    assert {path: path.read_bytes() for path in study.iterdir() if path.is_file()} == before


def test_terminal_table_fits(study: Path, tmp_path: Path) -> None:
    table = report.format_table(study)
    lines = table.splitlines()
    assert len(lines) == 1 + len(EVAL_LOSSES)
    assert max(map(len, lines)) <= 100
    column = lines[0].index("status")
    assert [line[column:] for line in lines[1:4]] == ["finished"] * 3
    assert lines[4].split() == [
        "all-DGram",
        "9.5000",
        "3.3000",
        "–",
        "unstable",
        "8",
        *"diverged at step 30".split(),
    ]

    long = replace(CONFIG, steps=50_000)
    run_dir = write_run(tmp_path, "none", config=long)
    run_dir.rename(tmp_path / ("a-very-long-name-of-a-run" * 3))
    for path in tmp_path.glob("*/result.json"):
        result = {
            "status": "non-finite",
            "step": 49_999,
            "validation_loss": None,
            "best_validation_loss": 12345.678,
        }
        path.write_text(json.dumps(result))
    assert max(map(len, report.format_table(tmp_path).splitlines())) <= 100


def test_probe_reduces_layers_and_keeps_gaps(study: Path) -> None:
    runs = {run.name: run for run in report.read_runs(study)}
    steps, logits = runs["hetero-inv"].probe("attention", "max_logit")
    np.testing.assert_array_equal(steps, [0, 10, 17])
    np.testing.assert_allclose(logits, [2.0, 4.0, np.nan])
    _, entropy = runs["dgram"].probe("attention", "entropy", over_layers=np.mean)
    np.testing.assert_allclose(entropy, [(2 / scale + 1.5) / 2 for scale in (1, 2, 3, 4)])
    _, smallest = runs["dgram"].probe("weights", "mlp/c_fc", "sigma_min", over_layers=np.min)
    np.testing.assert_allclose(smallest, [0.1, 0.05, 0.1 / 3, 0.025])
    np.testing.assert_allclose(runs["stiefel"].violation()[1], 3e-7)
    assert np.isnan(runs["dgram"].probe("attention", "unheard-of")[1]).all()


def test_solver_is_the_largest_over_matrices_and_layers(study: Path) -> None:
    runs = {run.name: run for run in report.read_runs(study)}
    np.testing.assert_array_equal(runs["dgram"].solver("iterations")[1], [np.nan, 3, 4, 5])
    np.testing.assert_allclose(runs["dgram"].solver("gap")[1], [np.nan, 0.009, 0.009, 0.009])
    assert np.isnan(runs["adamw"].solver("gap")[1]).all()


def test_differences_between_runs_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, "adamw")
    write_run(tmp_path, "none", config=replace(CONFIG, seed=3))
    report.write_report(tmp_path)
    (note,) = json.loads((tmp_path / "results.json").read_text())["notes"]
    assert "adamw and none differ" in note and "config.seed: 0 -> 3" in note and "optimizer.name" not in note
    assert html.escape(note) in (tmp_path / "report.html").read_text()


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "none")
    for name in ("metrics.jsonl", "result.json"):
        (run_dir / name).unlink()
    report.write_report(tmp_path)
    (row,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert row["status"] == "running, step 0 of 60"
    assert row["validation_loss"] is row["best_validation_loss"] is row["tokens_per_second"] is None


def test_directories_without_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        report.write_report(tmp_path / "absent")
    (tmp_path / "empty" / "folder").mkdir(parents=True)
    with pytest.raises(InputError, match="no run in .*empty.*config.json"):
        report.write_report(tmp_path / "empty")
    run_dir = write_run(tmp_path, "none")
    with pytest.raises(InputError, match="not one run's"):
        report.format_table(run_dir)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "train", "st', "not JSON"),
        ("", "not JSON"),
        ("12", "expected an object"),
        ('{"kind": "train", "step": 3}', "needs `loss`"),
    ],
)
def test_a_damaged_line_within_the_metrics_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    metrics = write_run(tmp_path, "none") / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[3] = line
    metrics.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=rf"metrics\.jsonl, line 4: .*{message}"):
        report.read_runs(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", '{"config": {}}', "lacks versions, corpus"),
        ("result.json", "{}", "lacks status"),
        (
            "result.json",
            '{"status": "odd", "step": 1, "validation_loss": 1, "best_validation_loss": 1}',
            "'odd' is none",
        ),
    ],
)
def test_other_damaged_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (write_run(tmp_path, "none") / name).write_text(content)
    with pytest.raises(InputError, match=message) as error:
        report.read_runs(tmp_path)
    assert name in str(error.value)


def test_a_failed_write_leaves_the_old_file(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page"
    target.write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):

        def fail(*_: object) -> None:
            raise OSError("disk full")

        patch.setattr(files.os, "replace", fail)
        files.write_whole(target, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["page"] and target.read_bytes() == b"old"
