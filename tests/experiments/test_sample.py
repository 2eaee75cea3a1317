"""Sampling with kept keys and values, against the model without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Model
from experiments.errors import InputError
from experiments.model import GPT2, init_params
from experiments.sample import generate, sample
from tests.experiments.exchange.runs import SETTINGS, trained

CONFIG = Model(
    vocab_size=20,
    context=16,
    layers=2,
    heads=2,
    width=16,
    parametrization="spectral",
    base_width=8,
    base_heads=1,
)
PARAMS = init_params(CONFIG, jax.random.key(0))
TOKENS = np.random.default_rng(0).integers(0, 20, (3, 16))


def test_logits_in_pieces_are_those_of_the_whole():
    model, variables, found = GPT2(CONFIG, decode=True), {"params": PARAMS}, []
    for piece in np.split(TOKENS, [5, 6, 7, 12], axis=1):
        logits, cache = model.apply(variables, piece, mutable=["cache"])
        found.append(logits)
        variables = {"params": PARAMS, **cache}
    expected = GPT2(CONFIG).apply({"params": PARAMS}, TOKENS)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-5)


def test_the_likeliest_tokens():
    tokens = TOKENS[:, :4]
    for _ in range(12):  # Up to the last place in the context.
        logits = GPT2(CONFIG).apply({"params": PARAMS}, tokens)
        tokens = np.concatenate([tokens, np.argmax(logits[:, -1:], axis=-1)], axis=1)
    found = generate(CONFIG, PARAMS, jnp.asarray(TOKENS[:, :4]), 12, 0.0, jax.random.key(0))
    np.testing.assert_array_equal(found, tokens[:, 4:])


def test_draws_follow_the_probabilities():
    prompt = jnp.asarray(np.repeat(TOKENS[:1, :4], 4000, axis=0))
    drawn = generate(CONFIG, PARAMS, prompt, 1, 0.5, jax.random.key(0))[:, 0]
    logits = GPT2(CONFIG).apply({"params": PARAMS}, prompt[:1])[0, -1]
    expected = np.asarray(jax.nn.softmax(logits / 0.5))
    found = np.bincount(drawn, minlength=20) / 4000
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / 4000))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(SETTINGS, tmp_path_factory.mktemp("sampled"))


def test_a_run(run_dir):
    text = sample(run_dir, "def ", 40)
    assert text == sample(run_dir, "def ", 40, seed=1)
    assert len(text) > 10
    assert sample(run_dir, "def ", 40, temperature=1.0) != sample(
        run_dir, "def ", 40, temperature=1.0, seed=1
    )


def test_refusals(run_dir, tmp_path):
    with pytest.raises(InputError, match="exceed the model's context of 80"):
        sample(run_dir, "def ", 77)
    with pytest.raises(InputError, match="at least one byte"):
        sample(run_dir, "", 3)
    with pytest.raises(InputError, match="holds no run"):
        sample(tmp_path, "def ", 3)
