"""Runs side by side: names, differing settings, times and the page, on made-up runs worked out by hand."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.__main__ import main
from experiments.reporting import comparison
from experiments.reporting.comparison import distinct_names, notes, read_all, settings
from experiments.reporting.line_labels import MOST_LABELS
from experiments.reporting.panels import step_panel, styles
from tests.experiments.stored_runs import CONFIG, write_run

WIDER = replace(CONFIG, model=replace(CONFIG.model, width=64), steps=80, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two studies, with a run of the same name in both, one run that diverged, and a live one."""
    for name in ("adamw", "hetero"):
        write_run(tmp_path / "first", name)
    for name in ("dgram", "hetero"):
        write_run(tmp_path / "second", name, config=WIDER)
    (tmp_path / "second" / "notes").mkdir()
    return tmp_path


def edit_config(run_dir: Path, **changes: object) -> None:
    path = run_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/one"], ["one"]),
        (["/a/one", "/a/two"], ["one", "two"]),
        (["/a/one", "/b/one", "/b/two"], ["a/one", "b/one", "two"]),
        (["/a/x/one", "/b/x/one", "/b/y/one"], ["a/x/one", "b/x/one", "y/one"]),
        (["/one", "/a/one"], ["/one", "a/one"]),
    ],
    ids=["alone", "names", "folders", "deeper", "root"],
)
def test_names_are_the_shortest_that_differ(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names


def test_each_run_is_read_once_in_the_order_of_the_arguments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "first")
    runs = read_all([Path("../second"), Path("adamw"), folder])
    assert [run.name for run in runs] == ["dgram", "second/hetero", "adamw", "first/hetero"]
    assert [run.config["model"]["width"] for run in runs] == [64, 64, 32, 32]


def test_only_the_settings_that_differ(folder: Path) -> None:
    edit_config(folder / "second" / "dgram", versions={"jax": "0.0.2"})
    runs = read_all([folder / "second" / "dgram", folder / "first" / "hetero"])
    assert settings(runs) == {
        "model.width": ["64", "32"],
        "optimizer.name": ["dgram", "hetero"],
        "steps": ["80", "60"],
        "seed": ["1", "0"],
        "versions.jax": ["0.0.2", "0.0.1"],
        "versions.flax": ["–", "0.0.2"],
    }
    assert settings(runs[:1]) == {}


def test_time_is_at_the_measured_speed(tmp_path: Path) -> None:
    """Eight sequences of 16 tokens a step; a quarter of the speed from step 20 on."""
    run_dir = write_run(tmp_path, "adamw")
    lines = [{"kind": "train", "step": step, "loss": 1.0} for step in range(1, 36)]
    for step, rate in ((10, 128.0), (20, 128.0), (30, 32.0)):
        lines.append({"kind": "speed", "step": step, "tokens_per_second": rate, "seconds": 1.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_all([run_dir])
    np.testing.assert_allclose(run.seconds(np.array([0, 5, 10, 20, 25, 30, 35])), [0, 5, 10, 20, 40, 60, 80])

    (run_dir / "metrics.jsonl").unlink()
    (run,) = read_all([run_dir])
    assert np.isnan(run.seconds(np.array([0, 1]))).all()


def test_the_last_loss_of_a_live_run(folder: Path) -> None:
    diverged, live = read_all([folder / "second"])
    assert (live.last, live.final, live.best, live.status) == (3.1, None, 3.1, "running, step 20 of 80")
    assert (diverged.last, diverged.best) == (9.5, 3.3)


def test_texts_and_vocabularies_that_differ_are_noted(folder: Path) -> None:
    assert notes(read_all([folder])) == []
    edit_config(folder / "first" / "adamw", corpus={"fingerprint": "decaf", "description": "other"})
    (note,) = notes(read_all([folder]))
    assert "different texts or vocabularies do not compare" in note
    assert "adamw (text decaf, 256 tokens" in note
    assert "first/hetero, dgram, second/hetero (text c0ffee, 256 tokens" in note

    wide = replace(CONFIG, model=replace(CONFIG.model, vocab_size=300))
    (note,) = notes(read_all([write_run(folder / "third", "none", config=wide), folder / "first" / "hetero"]))
    assert "none (text c0ffee, 300 tokens" in note and "hetero (text c0ffee, 256 tokens" in note


def test_other_held_out_windows_are_noted(tmp_path: Path) -> None:
    """More batches of the same windows are others; half the sequences in twice the batches are the same."""
    data = CONFIG.data
    same = replace(CONFIG, data=replace(data, batch_size=4, eval_batches=2 * data.eval_batches))
    other = replace(CONFIG, data=replace(data, eval_batches=5))
    write_run(tmp_path, "adamw")
    write_run(tmp_path, "none", config=same)
    assert notes(read_all([tmp_path])) == []
    write_run(tmp_path, "dgram", config=other)
    assert "different windows of held-out text" in notes(read_all([tmp_path]))[0]


def test_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "first" / "hetero" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    page = folder / "pages" / "page.html"
    main(["compare", str(folder), "--out", str(page)])
    printed = capsys.readouterr().out
    assert "running, step 20 of 60" in printed and printed.endswith(f"Page: {page}\n")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]

    content = page.read_text()
    text = re.sub(r'src="data:image/png;base64,[^"]+"', "", content)
    assert not re.search(r"\b(src|href|srcset|data|action)\s*=|<script|<link|@import|url\(|http|\$", text)
    assert "first/hetero: the last line of metrics.jsonl was cut short" in text
    assert "diverged at step 30" in text
    rows = [re.findall(r">([^<>]+)</t[hd]>", row) for row in re.findall(r"<tr>.*</tr>", text)]
    # Steps of 128 tokens, at 1000 tokens a second and 10 more at each of the next measurements.
    seconds = 10 * 128 * sum(1 / (1000 + step) for step in range(10, 70, 10))
    assert ["AdamW", "finished", "60", "3.0000", "3.0000", f"{seconds:.3g} s", "1,030"] in rows
    heads = ["run", "model.width", "optimizer.name", "steps", "seed"]
    assert heads in rows and ["second/hetero", "64", "hetero", "80", "1"] in rows
    images = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)">', content)
    titles = [title for title, _ in images]
    assert titles == [
        "Validation loss",
        "Validation loss, last half",
        "Training loss",
        "Validation loss",
        "Training loss",
        "Learning rate",
        "Gradient norm",
        *(f"Largest singular value, {m}" for m in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")),
        "Largest attention logit",
        "Solver iterations",
        "Relative duality gap",
    ]
    for _, data in images:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 20


def test_what_no_run_recorded_has_no_panel(tmp_path: Path) -> None:
    page = comparison.write_comparison(read_all([write_run(tmp_path, "adamw")]), tmp_path / "page.html")
    content = page.read_text()
    assert "Solver iterations" not in content and "Largest attention logit" in content
    assert "All settings are the same." in content


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "none")
    for name in ("metrics.jsonl", "result.json"):
        (run_dir / name).unlink()
    content = comparison.write_comparison(read_all([run_dir]), tmp_path / "page.html").read_text()
    assert "running, step 0 of 60" in content and "Largest" not in content


def test_of_many_lines_the_outermost_are_named() -> None:
    curves = {f"run {index:02}": (np.arange(2.0), np.full(2, float(index))) for index in range(40)}
    texts = step_panel(curves, styles(curves), "title", "nats").axes[0].texts
    assert len(texts) == MOST_LABELS
    assert {"run 00", "run 39"} <= {text.get_text() for text in texts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name at least one folder"),
        (("absent",), "absent is not a directory"),
        (("first", "empty"), "no run in .*empty: expected a folder with a config.json"),
        (("first", "--out", "first/adamw/config.json"), "config.json is no name of a page"),
        (("first", "--out", "folder.html"), "folder.html is no name of a page"),
        (("model",), r"model/config.json lacks config, versions, corpus"),
        (("damaged",), r"damaged/metrics.jsonl, line 1: not JSON"),
        (("other",), r"other/config.json: config lacks data, optimizer"),
    ],
    ids=["none", "absent", "empty", "no page", "a folder", "another's config", "metrics", "settings"],
)
def test_bad_input(
    folder: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("empty", "folder.html", "model"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    write_run(folder, "adamw").rename(folder / "damaged")
    (folder / "damaged" / "metrics.jsonl").write_text('{half\n{"kind": "speed"}\n')
    write_run(folder, "adamw").rename(folder / "other")
    edit_config(folder / "other", config={"model": {}, "steps": 3})
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as exit:
        main(["compare", *arguments])
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (folder / "runs").exists()
