"""A run mapped over eight devices is the run on one, and goes on on others."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.config import Data, Model, Optimizer, Run
from experiments.corpus import Corpus
from experiments.devices import Devices, layout
from experiments.errors import InputError
from experiments.metrics import read_metrics
from experiments.train import make_program, train

CONFIG = Run(
    model=Model(context=16, layers=3, heads=2, width=16),
    data=Data(batch_size=16, accumulation=2, eval_batches=2, probe_sequences=2),
    optimizer=Optimizer("hetero", warmup_steps=2),
    steps=6,
    eval_every=3,
    checkpoint_every=3,
)
EIGHT = {
    "pmap": Devices("pmap"),
    "data": Devices("mesh"),
    "fsdp": Devices("mesh", fsdp=8),
    "both": Devices("mesh", data=4, fsdp=2),
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    tokens = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
    return Corpus(tokens[:3000], tokens[3000:], "letters", "random letters")


def numbers(run_dir) -> np.ndarray:
    """Losses and gradient norms of updates, then the losses of evaluations."""
    lines = read_metrics(run_dir)
    updates = [(x["loss"], x["gradient_norm"]) for x in lines if x["kind"] == "train"]
    return np.concatenate([np.ravel(updates), [x["loss"] for x in lines if x["kind"] == "eval"]])


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus) -> np.ndarray:
    run_dir = tmp_path_factory.mktemp("alone")
    train(CONFIG, run_dir, corpus=corpus, progress=False)
    return numbers(run_dir)


@pytest.mark.parametrize("name", EIGHT)
def test_the_same_run(name, alone, corpus, tmp_path):
    train(CONFIG, tmp_path, corpus=corpus, devices=EIGHT[name], progress=False)
    found = numbers(tmp_path)
    assert len(found) == 2 * CONFIG.steps + 3
    np.testing.assert_allclose(found, alone, rtol=1e-5)


@pytest.mark.parametrize(("first", "then"), [("pmap", "both"), ("both", "pmap"), ("fsdp", None)])
def test_goes_on_on_other_devices(first, then, alone, corpus, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("experiments.metrics.RunLog.evaluation", stop_at(CONFIG.steps, stop))
        with pytest.raises(KeyboardInterrupt):
            train(CONFIG, tmp_path, corpus=corpus, devices=EIGHT[first], progress=False)
    train(CONFIG, tmp_path, corpus=corpus, devices=EIGHT[then] if then else Devices(), progress=False)
    np.testing.assert_allclose(numbers(tmp_path), alone, rtol=1e-5)


def stop_at(last: int, stop):
    """`RunLog.evaluation`, but for the one at the last step."""
    from experiments.metrics import RunLog

    evaluation = RunLog.evaluation
    return lambda log, step, values: stop() if step == last else evaluation(log, step, values)


def test_fsdp_divides_the_state(corpus):
    """Before and after a step."""
    program = make_program(CONFIG, corpus, EIGHT["fsdp"])
    state = program.initial_state()
    assert share_here(state) < 1 / 6
    tokens = np.zeros((CONFIG.data.batch_size, CONFIG.model.context + 1), np.int32)
    state, _ = program.train_step(state, program.where.batch(tokens))
    assert share_here(state) < 1 / 6


def share_here(state) -> float:
    """Of the state's bytes, on the first device."""
    leaves = jax.tree.leaves(state)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (Devices("mesh", data=3), "8 sequences .* 3 devices"),
        (Devices("mesh", data=4, fsdp=4), "needs 16 devices, and there are 8"),
        (Devices("mesh", fsdp=0), "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(devices, message):
    with pytest.raises(InputError, match=message):
        layout(devices, CONFIG)


def test_a_batch_that_does_not_divide_is_refused_before_the_folder_is_made(corpus, tmp_path):
    config = replace(CONFIG, data=replace(CONFIG.data, batch_size=12))
    with pytest.raises(InputError, match="6 sequences"):
        train(config, tmp_path / "run", corpus=corpus, devices=Devices("pmap"), progress=False)
    assert not (tmp_path / "run").exists()
