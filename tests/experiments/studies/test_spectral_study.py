"""The study of the spectral parametrisation: its plan, its checks, resumption, and what its report says."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.commands import studies as study_commands
from experiments.config import ADAMW, SGD, Data, Model, Optimizer, Run
from experiments.errors import InputError
from experiments.files import read_json, write_json
from experiments.model import GPT2, init_params
from experiments.reporting.records import RunRecord, comparison_notes
from experiments.studies import named_runs
from experiments.studies.spectral import check as check_module
from experiments.studies.spectral import study as study_module
from experiments.studies.spectral.check import LOGITS, gpt2_features, gpt2_probe, read_check, run_check
from experiments.studies.spectral.plan import (
    MUON,
    PLAN,
    SPECTRAL_PRESETS,
    Check,
    SpectralStudy,
    Sweep,
    Trial,
    trial_of,
)
from experiments.studies.spectral.report import MAY_DIFFER
from experiments.studies.spectral.results import (
    check_rows,
    input_rows,
    read_checks,
    read_study,
    sweep_losses,
    sweep_rows,
    transfer_rows,
)
from spectral import CoordinateCheck, coordinate_check, log_log_slope

TINY = SPECTRAL_PRESETS["tiny"]
SMALL = SpectralStudy(
    base=Run(
        model=Model(context=16, layers=2, base_width=8, base_heads=2),
        data=Data(batch_size=2, eval_batches=1, probe_sequences=1),
        optimizer=Optimizer(name=ADAMW, weight_decay=0.0, warmup_steps=1),
        steps=2,
        eval_every=1,
        checkpoint_every=2,
        alignment=True,
    ),
    widths=(8, 16),
    rates={ADAMW: (1e-3, 2e-3)},
    check_rates={ADAMW: 1e-3},
    extensions=0,
    check_widths=(8, 16),
    check_steps=2,
    check_seeds=1,
)


def test_configurations_of_the_tiny_study() -> None:
    wide = TINY.config(Trial("spectral", ADAMW, 256, 0.008, 1))
    assert (wide.model.width, wide.model.heads, wide.model.base) == (
        256,
        16,
        replace(wide.model, width=32, heads=2),
    )
    assert (wide.optimizer.learning_rate, wide.seed, wide.model.spectral) == (0.008, 1, True)
    muon = TINY.config(Trial("standard", MUON, 32, 0.04, 0))
    assert muon.optimizer.muon_learning_rate == 0.04
    assert muon.optimizer.learning_rate == pytest.approx(0.006)
    for run in (wide, muon):
        assert TINY.config(trial_of(asdict(run))) == run
    large_heads = TINY.check_config(Check("spectral", SGD, "head_size"), 512, 0)
    assert (large_heads.model.heads, large_heads.optimizer.warmup_steps) == (2, 0)
    assert large_heads.optimizer.final_fraction == 1
    names = [Trial(*sweep, 0.1, 0).name for sweep in TINY.sweeps]
    assert len(set(names)) == len(names) == 4 * 3 * 2
    assert len({check.name for check in TINY.checks}) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (8,)}, r"two or more ascending widths, got \(8,\)"),
        ({"check_widths": (8, 8)}, "two or more ascending widths"),
        ({"rates": {ADAMW: ()}}, "ascending rates for adamw"),
        ({"rates": {ADAMW: (2e-3, 1e-3)}}, "ascending rates for adamw"),
        ({"rates": {ADAMW: (1e-3, 0.0)}}, "ascending rates for adamw"),
        ({"rates": {}, "check_rates": {}}, "for the same ones of"),
        ({"rates": {"lion": (1.0,)}, "check_rates": {"lion": 1.0}}, "the same ones of adamw, sgd, none"),
        ({"check_rates": {}}, "rates and check_rates for the same"),
        ({"rates": {ADAMW: (-1.0, 1.0)}}, "learning_rate must be positive"),
        ({"seeds": 0}, "at least 1 seed"),
        ({"widths": (8, 14)}, "width 14 is no multiple of the heads' size, 4"),
    ],
)
def test_impossible_plans(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **changes)


def test_a_plan_is_kept_and_compared(tmp_path: Path) -> None:
    SMALL.save(tmp_path)
    SMALL.save(tmp_path)
    assert SpectralStudy.load(tmp_path) == SMALL
    with pytest.raises(InputError, match="holds another study"):
        replace(SMALL, seeds=3).save(tmp_path)
    content = read_json(tmp_path / PLAN)
    write_json(tmp_path / PLAN, content | {"colour": "red"})
    with pytest.raises(InputError, match="not a study's plan"):
        SpectralStudy.load(tmp_path)
    write_json(tmp_path / PLAN, content | {"rates": None})
    with pytest.raises(InputError, match="not a study's plan"):
        SpectralStudy.load(tmp_path)


def test_features_of_a_check_are_the_models_own() -> None:
    config = SMALL.base.model
    params = init_params(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 9))
    found = gpt2_features(config)(params, tokens)
    blocks = [f"h{i} {part}" for i in range(2) for part in ("heads", "hidden", "stream")]
    assert list(found) == [*blocks, LOGITS]
    logits = GPT2(config).apply({"params": params}, tokens[:, :-1])
    np.testing.assert_allclose(found[LOGITS], logits, rtol=0, atol=1e-6)
    assert found["h1 hidden"].shape == (2, 8, 4 * config.width)
    # The last stream is what the final norm and the tied head make the logits of.
    last = np.asarray(found["h1 stream"], np.float64)
    centred = last - last.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = normed @ np.asarray(params["wte"]["embedding"], np.float64).T
    np.testing.assert_allclose(found[LOGITS], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "growth"), [(ADAMW, "head_size"), (SGD, "heads")])
def test_sizes_hold_at_every_width(optimizer: str, growth: str) -> None:
    """The coordinate check itself, at small widths: slopes near 0, where the standard's are not."""
    blocks, logits = change_slopes(Check("spectral", optimizer, growth))
    assert np.abs(blocks).max() < 0.25 and abs(logits) < 0.25


def test_standard_sizes_do_not() -> None:
    blocks, _ = change_slopes(Check("standard", ADAMW, "heads"))
    assert blocks.max() > 0.5


def change_slopes(check: Check) -> tuple[np.ndarray, float]:
    """Slopes of the changes of the blocks' features, and of the logits', on a real text."""
    model = replace(TINY.base.model, layers=1)
    study = replace(TINY, base=replace(TINY.base, model=model), check_widths=(32, 128), check_steps=5)
    made = coordinate_check(
        lambda width: gpt2_probe(study.check_config(check, width, 0)),
        study.check_widths,
        batch=tokens_of_text(),
        steps=study.check_steps,
    )
    blocks = [slope.changes for name, slope in made.slopes.items() if name != LOGITS]
    return np.array(blocks), made.slopes[LOGITS].changes


def tokens_of_text() -> np.ndarray:
    """A batch (4, 33) of the study's own text."""
    return np.array(named_runs.load_corpus(TINY.base).train[: 4 * 33]).reshape(4, 33).astype(np.int32)


def made_up_check(make, widths, **options) -> CoordinateCheck:
    """Features that grow with the widths' square root, changes that do not, and logits' that shrink."""
    del make, options
    sizes = np.array(widths, float)[:, None] * np.ones(3)
    features = {"h0 stream": sizes**0.5, LOGITS: sizes**-0.25}
    return CoordinateCheck(tuple(widths), features, {"h0 stream": sizes**0, LOGITS: sizes**-1.0})


def test_a_study_from_plan_to_report(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """Interrupted in a sweep and taken up again; then the numbers of its report against its files."""
    monkeypatch.setattr(check_module, "coordinate_check", made_up_check)
    plan = replace(SMALL, rates={ADAMW: (1e-3,)}, seeds=1)
    train, made = named_runs.train, []

    def interrupted(config, run_dir, **options):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(run_dir.name)
        return train(config, run_dir, **options)

    monkeypatch.setattr(named_runs, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study_module.run_spectral(plan, tmp_path, progress=False)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    checks = {path: path.stat().st_mtime_ns for path in tmp_path.glob("check-*.json")}
    assert (len(stored), len(checks)) == (2, 3)
    monkeypatch.setattr(named_runs, "train", train)
    report = study_module.run_spectral(plan, tmp_path, progress=False)
    assert all(path.stat().st_mtime_ns == time for path, time in (stored | checks).items())
    shown = capsys.readouterr().out
    assert f"Report: {report}" in shown and "| AdamW | spectral |" in shown

    study, runs = read_study(tmp_path)
    assert study == plan and len(runs) == 2 * 2
    for parametrization in ("standard", "spectral"):
        for width in plan.widths:
            name = Trial(parametrization, ADAMW, width, 1e-3, 0).name
            loss = read_json(tmp_path / name / "result.json")["validation_loss"]
            losses = sweep_losses(runs, Sweep(parametrization, ADAMW, width), 1)
            assert losses == {1e-3: loss}
    for row in transfer_rows(runs, study):
        assert (row.tuned_rate, row.best_rate, row.shift, row.excess) == (1e-3, 1e-3, 0, 0)
    assert not comparison_notes([*map(of_config, plan_of_all_optimizers())], MAY_DIFFER, "")
    for check, row in zip(plan.checks, check_rows(read_checks(study, tmp_path)), strict=True):
        assert (row.parametrization, row.optimizer, row.growth) == check
        assert row.features == pytest.approx([0.5, 0.5]) and row.changes == pytest.approx([0, 0])
        assert (row.logits, row.logit_changes) == pytest.approx((-0.25, -1))
    for row in input_rows(runs, study):
        # Four inputs an output: three quarters of a random input lie in the null space.
        assert all(0.4 < share < 0.95 for share in row.null_space)
        assert all(0 < each < 1 for each in row.alignment)
        if row.parametrization == "spectral":
            # Residual branches are scaled by 1 / sqrt(2 layers).
            assert row.norm[0] == pytest.approx(0.5, rel=0.25)
    page = report.read_text()
    assert page.count("<img") == 2 + 6 + 3
    results = read_json(tmp_path / "results.json")
    assert not results["notes"] and len(results["transfers"]) == 2
    before = report.read_bytes()
    main(["report", str(tmp_path)])
    assert report.read_bytes() == before


def plan_of_all_optimizers() -> list[Run]:
    return [TINY.config(Trial(*sweep, 0.1, 0)) for sweep in TINY.sweeps]


def of_config(config: Run) -> RunRecord:
    return RunRecord("", {"config": asdict(config)}, [], [], [], 1, None)


def fake_run(status: str, loss: float | None) -> RunRecord:
    result = {"status": status, "step": 1, "validation_loss": loss, "best_validation_loss": loss}
    return RunRecord("", {}, [], [], [], 1, result)


def test_rates_that_move_and_rates_that_stay() -> None:
    """Losses made up, two seeds: standard's best rate falls by 4 from width 8 to 16, spectral's stays."""
    best = {("standard", 8): 4e-3, ("standard", 16): 1e-3, ("spectral", 8): 4e-3, ("spectral", 16): 4e-3}
    runs = {}
    for (parametrization, width), least in best.items():
        for rate in (1e-3, 2e-3, 4e-3):
            for seed in (0, 1):
                loss = 2 + 0.1 * abs(np.log2(rate / least)) + 0.01 * seed
                trial = Trial(parametrization, ADAMW, width, rate, seed)
                runs[trial] = fake_run("finished", loss)
        for seed, status in enumerate(("finished", "diverged")):
            runs[Trial(parametrization, ADAMW, width, 8e-3, seed)] = fake_run(status, 1.0)
        # One seed of two has ended: no number yet.
        runs[Trial(parametrization, ADAMW, width, 16e-3, 0)] = fake_run("finished", 1.0)
    losses = sweep_losses(runs, Sweep("standard", ADAMW, 16), 2)
    assert losses == {
        1e-3: pytest.approx(2.005),
        2e-3: pytest.approx(2.105),
        4e-3: pytest.approx(2.205),
        8e-3: None,
    }
    standard, spectral = transfer_rows(runs, replace(SMALL, rates={ADAMW: (1e-3, 2e-3)}))
    assert (standard.tuned_rate, standard.best_rate, standard.shift) == (4e-3, 1e-3, -2)
    assert standard.excess == pytest.approx(2.205 / 2.005 - 1)
    assert (spectral.shift, spectral.excess) == (0, 0)
    assert spectral.transferred == "finished"
    rows = sweep_rows(runs, replace(SMALL, rates={ADAMW: (1e-3, 2e-3)}))
    # 4e-3 lies below 8e-3, which was tried and diverged; 1e-3 is the lowest.
    assert [row.at_an_end for row in rows] == [False, True, False, False]
    assert rows[0].losses["0.008"] == [1.0, None]


@pytest.mark.parametrize(("status", "ending"), [("diverged", "diverged"), (None, "not tried")])
def test_a_rate_that_cannot_be_transferred(status: str | None, ending: str) -> None:
    runs = {}
    for parametrization in ("standard", "spectral"):
        runs[Trial(parametrization, ADAMW, 8, 4e-3, 0)] = fake_run("finished", 2.0)
        runs[Trial(parametrization, ADAMW, 16, 1e-3, 0)] = fake_run("finished", 2.0)
        if status:
            runs[Trial(parametrization, ADAMW, 16, 4e-3, 0)] = fake_run(status, 5.0)
    for row in transfer_rows(runs, replace(SMALL, seeds=1)):
        assert (row.transferred, row.transferred_loss, row.excess) == (ending, None, None)
        assert row.shift == -2


def test_a_tuned_rate_is_tried_at_the_largest_width(tmp_path: Path, monkeypatch) -> None:
    """Losses made up: at width 8 the best rate is far above those that are tried at width 16."""
    asked = []

    def made_up(config, run_dir, corpus, progress):
        asked.append(run_dir.name)
        least = 16e-3 if config.model.width == 8 else 1e-3
        return 2 + abs(np.log2(config.optimizer.learning_rate / least))

    for name, stand_in in {
        "train_named": made_up,
        "run_check": lambda *_: "",
        "conclude": lambda *_: Path("report.html"),
    }.items():
        monkeypatch.setattr(study_module, name, stand_in)
    study_module.run_spectral(replace(SMALL, extensions=3, seeds=1), tmp_path)
    assert asked[-2:] == [Trial(each, ADAMW, 16, 16e-3, 0).name for each in ("standard", "spectral")]
    assert len(asked) == len(set(asked)) == 2 * (2 + 3) + 2 * (2 + 1) + 2


def test_a_stored_check_is_read(tmp_path: Path) -> None:
    check = SMALL.checks[0]
    assert read_check(tmp_path, check) is None
    corpus = named_runs.load_corpus(SMALL.base)
    made = run_check(SMALL, check, corpus, tmp_path)
    again = run_check(SMALL, check, corpus, tmp_path)
    for name in made.features:
        np.testing.assert_allclose(again.changes[name], made.changes[name])
    assert again.slopes[LOGITS].features == pytest.approx(
        log_log_slope(made.widths, made.features[LOGITS][:, -1])
    )
    with pytest.raises(InputError, match="check on another text"):
        run_check(SMALL, check, replace(corpus, fingerprint="0"), tmp_path)
    path = tmp_path / f"{check.name}.json"
    content = read_json(path)
    for damage in ({"changes": None}, {"features": {"h0 stream": [[1.0]]}}, {"widths": [8]}):
        write_json(path, content | damage)
        with pytest.raises(InputError, match="not a coordinate check"):
            read_check(tmp_path, check)


def test_command_line_names_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(study_commands, "run_spectral", lambda study, dir: asked.update(study=study, dir=dir))
    main(["spectral", "--steps", "50", "--corpus", "text.txt"])
    assert asked["study"].base.steps == 50 and asked["study"].base.data.corpus == "text.txt"
    assert asked["dir"] == Path("runs/spectral-tiny")
    main(["spectral", "--preset", "paper"])
    assert asked["study"] == SPECTRAL_PRESETS["paper"]
