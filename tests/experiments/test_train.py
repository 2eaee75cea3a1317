"""The update and the loop, on a model of two layers."""

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import files
from experiments import train as training
from experiments.checkpoints import Checkpoints, on_default_device
from experiments.config import Data, Model, Optimizer, Run, Sel, to_dict
from experiments.corpus import Corpus, validation_batches
from experiments.errors import InputError
from experiments.metrics import read_metrics
from experiments.model import GPT2
from experiments.train import TrainState, init_state, make_train_step, train

CONFIG = Run(
    model=Model(context=16, layers=2, heads=2, width=16),
    data=Data(batch_size=4, eval_batches=3, probe_sequences=2),
    optimizer=Optimizer(name="adamw", warmup_steps=2),
    steps=10,
    eval_every=4,
    checkpoint_every=4,
    log_every=3,
)

DROPPING = replace(
    CONFIG, model=replace(CONFIG.model, dropout=0.3), data=replace(CONFIG.data, accumulation=2)
)
SGD = optax.sgd(0.5)


def make_corpus(seed=0):
    tokens = np.random.default_rng(seed).integers(97, 123, 4000).astype(np.uint8)
    return Corpus(tokens[:3000], tokens[3000:], f"fingerprint-{seed}", f"random letters {seed}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's folder, its result and the corpus."""
    run_dir, corpus = tmp_path_factory.mktemp("finished") / "run", make_corpus()
    return run_dir, train(CONFIG, run_dir, corpus=corpus, progress=False), corpus


@pytest.fixture
def nothing_is_built(monkeypatch):
    def fail(*_):
        raise AssertionError("functions were built, so something could be compiled")

    monkeypatch.setattr(training, "make_program", fail)


def with_optimizer(**changes):
    return replace(CONFIG, optimizer=replace(CONFIG.optimizer, **changes))


def cross_entropy(config, params, tokens):
    """In float64, from the model's logits."""
    logits = np.asarray(jax.jit(GPT2(config.model).apply)({"params": params}, tokens[:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def a_batch(seed=1):
    return np.random.default_rng(seed).integers(0, 256, (4, 17)).astype(np.int32)


@functools.cache
def initial_params():
    """On the host, so that no step can donate them."""
    return jax.device_get(jax.jit(functools.partial(init_state, CONFIG, SGD))().params)


def sgd_step(config, tokens=None, step=0):
    """One update of the same initial parameters, by SGD without clipping."""
    state = TrainState(initial_params(), SGD.init(initial_params()), np.int32(step))
    return make_train_step(config, SGD)(state, a_batch() if tokens is None else tokens)


def test_update_follows_the_mean_gradient():
    before = initial_params()
    state, update = sgd_step(CONFIG)
    np.testing.assert_allclose(update.loss, cross_entropy(CONFIG, before, a_batch()), rtol=1e-6)
    # SGD without clipping moves by 0.5 times the gradient.
    gradient = jax.tree.map(lambda old, new: (old - np.asarray(new)) / 0.5, before, state.params)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(update.gradient_norm, norm, rtol=1e-3)
    # And down the slope: a small part of the step changes the loss as the gradient says.
    small = jax.tree.map(lambda old, g: old - 1e-3 * g, before, gradient)
    drop = cross_entropy(CONFIG, before, a_batch()) - cross_entropy(CONFIG, small, a_batch())
    np.testing.assert_allclose(drop, 1e-3 * norm**2, rtol=2e-2)
    assert state.step == 1


def test_accumulated_micro_batches_equal_one_batch():
    accumulated = replace(CONFIG, data=replace(CONFIG.data, accumulation=2))
    (one, one_update), (two, two_update) = sgd_step(CONFIG), sgd_step(accumulated)
    chex.assert_trees_all_close(two_update, one_update, rtol=1e-6)
    chex.assert_trees_all_close(two.params, one.params, atol=1e-6)


def test_gradient_norm_is_taken_before_clipping_and_the_rate_is_the_schedules():
    clipped = with_optimizer(clip_norm=1e-3)
    optimizer = training.make_optimizer(clipped)
    state = jax.jit(functools.partial(init_state, clipped, optimizer))()
    _, update = make_train_step(clipped, optimizer)(state, a_batch())
    np.testing.assert_allclose(update.gradient_norm, sgd_step(CONFIG)[1].gradient_norm, rtol=1e-6)
    np.testing.assert_allclose(update.learning_rate, training.learning_rate_schedule(clipped)(0), rtol=1e-6)


def test_dropout_depends_on_seed_and_step_alone():
    def loss(step=0, seed=0):
        return float(sgd_step(replace(DROPPING, seed=seed), step=step)[1].loss)

    assert loss() == loss()
    assert len({loss(), loss(step=1), loss(seed=1)}) == 3


def test_micro_batches_drop_different_units():
    half = a_batch()[:2]
    together = sgd_step(DROPPING, np.repeat(half, 2, axis=0))[1].loss
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 2)
    mean_loss = jax.jit(functools.partial(training.mean_loss, GPT2(DROPPING.model)))
    alone = [mean_loss(initial_params(), half, key) for key in keys]
    assert alone[0] != alone[1]
    np.testing.assert_allclose(together, np.mean(alone), rtol=1e-6)


def test_metrics_hold_every_step_once_and_in_order(finished):
    run_dir, result, corpus = finished
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    updates = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in updates] == list(range(1, 11))
    assert set(updates[0]) == {"kind", "step", "loss", "gradient_norm", "learning_rate"}
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 4, 8, 10]
    assert set(evaluations[0]) == {"kind", "step", "loss", "attention", "weights"}
    assert set(evaluations[0]["attention"]) == {"max_logit", "entropy", "saturated", "jacobian"}
    assert len(evaluations[0]["weights"]["mlp/c_fc"]["sigma_max"]) == CONFIG.model.layers
    speeds = [line for line in lines if line["kind"] == "speed"]
    assert [line["step"] for line in speeds] == [3, 6, 9]
    # Two steps before the first: the compiled one does not count.
    tokens = [line["tokens_per_second"] * line["seconds"] / (4 * 16) for line in speeds]
    np.testing.assert_allclose(tokens, [2, 3, 3])
    assert result.status == "finished"
    assert result.step == 10
    assert result.validation_loss == evaluations[-1]["loss"]
    assert result.best_validation_loss == min(line["loss"] for line in evaluations)
    assert json.loads((run_dir / "result.json").read_text()) == asdict(result)


def test_evaluation_is_the_mean_over_the_fixed_batches(finished):
    run_dir, _, corpus = finished
    batches = validation_batches(corpus, batch_size=4, context=16, count=3)
    expected = np.mean([cross_entropy(CONFIG, initial_params(), tokens) for tokens in batches])
    np.testing.assert_allclose(read_metrics(run_dir)[0]["loss"], expected, rtol=1e-6)


def test_how_often_losses_are_read_changes_no_metric(finished, tmp_path):
    run_dir, _, corpus = finished
    train(replace(CONFIG, log_every=1, checkpoint_every=100), tmp_path, corpus=corpus, progress=False)

    def without_speed(folder):
        return [line for line in read_metrics(folder) if line["kind"] != "speed"]

    assert without_speed(tmp_path) == without_speed(run_dir)


def test_config_file_says_what_the_run_depends_on(finished):
    run_dir, _, corpus = finished
    stored = json.loads((run_dir / "config.json").read_text())
    assert stored["config"] == to_dict(CONFIG)
    assert stored["corpus"] == {"fingerprint": corpus.fingerprint, "description": corpus.description}
    assert stored["versions"]["jax"] == jax.__version__
    assert set(stored) == {"config", "seed", "corpus", "versions", "platform", "devices"}


def test_a_finished_run_is_not_run_again(finished, nothing_is_built):
    run_dir, result, corpus = finished
    files = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert train(CONFIG, run_dir, corpus=corpus, progress=False) == result
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == files


def test_another_configuration_is_refused(finished, nothing_is_built):
    run_dir, _, corpus = finished
    wider = replace(CONFIG, model=replace(CONFIG.model, width=32), seed=1)
    with pytest.raises(ValueError, match=r"model.width: 16 -> 32; seed: 0 -> 1.*another directory"):
        train(wider, run_dir, corpus=corpus, progress=False)


def test_another_text_is_refused(finished, nothing_is_built):
    run_dir = finished[0]
    with pytest.raises(ValueError, match=r"random letters 0.*now random letters 1.*another directory"):
        train(CONFIG, run_dir, corpus=make_corpus(1), progress=False)


def test_another_environment_is_told(tmp_path, finished, nothing_is_built):
    run_dir, result, corpus = finished
    stored = json.loads((run_dir / "config.json").read_text())
    stored["versions"]["jax"] = "0.0.1"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "result.json").write_text((run_dir / "result.json").read_text())
    with pytest.warns(UserWarning, match="versions.jax: '0.0.1' -> "):
        train(CONFIG, tmp_path, corpus=corpus, progress=False)


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(InputError, match="is being trained by another process"):
            training.train(CONFIG, tmp_path, corpus=make_corpus(), progress=False)
        assert not (tmp_path / "metrics.jsonl").exists()
        other.kill()
    with files.locked(tmp_path):
        pass


def test_a_folder_with_anothers_metrics_is_refused(tmp_path, nothing_is_built):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl but no config.json"):
        train(CONFIG, tmp_path, corpus=make_corpus(), progress=False)
    assert (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_optimizer(name="adagrad"), "adagrad"),
        (replace(CONFIG, data=replace(CONFIG.data, batch_size=1000)), "too few for one batch"),
    ],
)
def test_a_configuration_that_cannot_run_leaves_no_folder(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run", corpus=make_corpus(), progress=False)
    assert not (tmp_path / "run").exists()


def test_non_finite_loss_ends_the_run_at_its_first_step(tmp_path):
    # The second update's parameters overflow; five more are made before the losses are read.
    config = replace(with_optimizer(learning_rate=1e30, warmup_steps=0), log_every=7, eval_every=100)
    result = train(config, tmp_path, corpus=make_corpus(), progress=False)
    assert (result.status, result.step) == ("non-finite", 2)
    assert "loss is nan at update 2" in result.reason
    updates = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in updates] == [1, 2]
    assert updates[0]["loss"] is not None
    assert updates[1]["loss"] is None
    assert json.loads((tmp_path / "result.json").read_text()) == asdict(result)
    assert train(config, tmp_path, corpus=make_corpus(), progress=False) == result


@pytest.fixture
def spoil(monkeypatch):
    """Gradients at these updates are NaN, and their losses are not; the run is stopped before `stop`."""

    def spoil(*spoiled, stop=None):
        monkeypatch.undo()
        mean_loss, train_batches = training.mean_loss, training.train_batches

        def batches(*arguments, start_step, **settings):
            found = train_batches(*arguments, start_step=start_step, **settings)
            for step, tokens in enumerate(found, start_step + 1):
                if step == stop:
                    raise KeyboardInterrupt
                yield np.zeros_like(tokens) if step in spoiled else tokens

        def loss(model, params, tokens, *key):
            # The root's slope is infinite on the batch of zeros, and the loss is not.
            zero = 0.0 * params["ln_f"]["scale"][0] + jnp.where(jnp.all(tokens == 0), 0.0, 1.0)
            return mean_loss(model, params, tokens, *key) + jnp.sqrt(zero)

        monkeypatch.setattr(training, "train_batches", batches)
        monkeypatch.setattr(training, "mean_loss", loss)

    return spoil


def test_non_finite_gradient_under_a_finite_loss_ends_the_run(tmp_path, spoil):
    spoil(6)
    result = train(CONFIG, tmp_path, corpus=make_corpus(), progress=False)
    assert (result.status, result.step) == ("non-finite", 6)
    assert "gradient_norm is nan at update 6" in result.reason
    last = read_metrics(tmp_path)[-1]
    assert (last["step"], last["gradient_norm"]) == (6, None)
    assert last["loss"] is not None


@pytest.mark.parametrize("name", ["adamw", "hetero"])
def test_some_non_finite_gradients_are_left_out(tmp_path, spoil, name):
    spoil(2, 5, 6)
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, name=name, skips=2))
    result = train(config, tmp_path, corpus=make_corpus(), progress=False)
    assert result.status == "finished" and result.validation_loss is not None
    lines = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines if line["gradient_norm"] is None] == [2, 5, 6]
    assert all(line["loss"] is not None for line in lines)


def test_too_many_in_a_row_end_the_run_though_it_was_taken_up_between(tmp_path, spoil):
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, skips=2), checkpoint_every=1)
    spoil(5, 6, 7, stop=7)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, corpus=make_corpus(), progress=False)
    spoil(5, 6, 7)
    result = train(config, tmp_path, corpus=make_corpus(), progress=False)
    assert (result.status, result.step) == ("non-finite", 7)
    assert "gradient_norm is nan at update 7" in result.reason


def test_divergence_ends_the_run_at_the_evaluation_that_shows_it(tmp_path):
    config = replace(with_optimizer(learning_rate=3.0, warmup_steps=0), eval_every=2)
    result = train(config, tmp_path, corpus=make_corpus(), progress=False)
    losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path) if line["kind"] == "eval"}
    assert result.status == "diverged"
    assert result.step == max(losses) < 10
    assert result.validation_loss == losses[result.step] > min(losses.values()) + config.divergence_margin
    assert result.best_validation_loss == min(losses.values())
    earlier = [losses[step] for step in sorted(losses)[:-1]]
    assert all(loss <= min(earlier[: i + 1]) + 1 for i, loss in enumerate(earlier))


def test_a_margin_it_stays_within_lets_the_same_run_finish(tmp_path):
    config = replace(with_optimizer(learning_rate=3.0, warmup_steps=0), divergence_margin=1e6)
    assert train(config, tmp_path, corpus=make_corpus(), progress=False).status == "finished"


def test_errors_that_are_not_results_propagate(tmp_path, monkeypatch):
    def failing(*_, **__):
        yield a_batch()
        raise MemoryError("out of memory")

    monkeypatch.setattr(training, "train_batches", failing)
    with pytest.raises(MemoryError):
        train(CONFIG, tmp_path, corpus=make_corpus(), progress=False)
    assert not (tmp_path / "result.json").exists()


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(finished, tmp_path):
    run_dir, result, corpus = finished
    damaged = tmp_path / "run"
    shutil.copytree(run_dir, damaged)
    (damaged / "result.json").unlink()
    for path in (damaged / "checkpoints" / "10").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="going back to step 8"):
        assert train(CONFIG, damaged, corpus=corpus, progress=False) == result
    found, expected = ([m for m in read_metrics(x) if m["kind"] != "speed"] for x in (damaged, run_dir))
    assert found == expected


def test_a_progress_bar_in_a_log_file_is_a_few_lines(tmp_path, capsys):
    train(CONFIG, tmp_path, corpus=make_corpus(), progress=True)
    shown = capsys.readouterr().err
    assert "adamw: 100%" in shown
    assert "10/10" in shown
    assert "tokens/s" in shown
    assert len(shown.splitlines()) <= 4


def test_a_run_under_sel_that_was_interrupted_ends_like_one_that_was_not(tmp_path, monkeypatch):
    config, train_batches = replace(CONFIG, sel=Sel(on=True)), training.train_batches

    def interrupted(*arguments, **settings):
        for step, tokens in enumerate(train_batches(*arguments, **settings), 1):
            if step == 7:
                raise KeyboardInterrupt
            yield tokens

    def last(folder):
        lines = [line for line in read_metrics(folder) if line["kind"] != "speed"]
        state = jax.eval_shape(functools.partial(init_state, config, training.make_optimizer(config)))
        with Checkpoints(folder / "checkpoints") as checkpoints:
            return lines, jax.device_get(checkpoints.restore(on_default_device(state)))

    train(config, tmp_path / "whole", corpus=make_corpus(), progress=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "train_batches", interrupted)
        train(config, tmp_path / "stopped", corpus=make_corpus(), progress=False)
    train(config, tmp_path / "stopped", corpus=make_corpus(), progress=False)
    (lines, state), (expected_lines, expected) = last(tmp_path / "stopped"), last(tmp_path / "whole")
    assert lines == expected_lines
    chex.assert_trees_all_equal(state, expected)
    kernel = state.params["h"]["mlp"]["c_fc"]["kernel"]
    assert {name: np.ptp(factors[0]) > 0 for name, factors in kernel.scales.items()} == dict.fromkeys(
        "elmn", True
    )
