"""transformers loads an exported model: the same logits, the same text."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exchange.folders import load_run
from experiments.model import GPT2
from experiments.sample import sample

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peers
PROMPT = "def é"


def test_logits(run_dir, model_dir):
    model = transformers.GPT2LMHeadModel.from_pretrained(model_dir).eval()
    config, state = load_run(run_dir)
    tokens = np.random.default_rng(0).integers(0, 256, (2, config.model.context))
    with torch.no_grad():
        found = model(torch.from_numpy(tokens)).logits.numpy()
    expected = GPT2(config.model).apply({"params": state.params}, jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_the_tokenizer_is_of_bytes(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = "".join(map(chr, range(32, 700))) + "\n\t  x"
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_the_likeliest_continuation(run_dir, model_dir):
    generator = transformers.pipeline("text-generation", model=str(model_dir))
    found = generator(PROMPT, max_new_tokens=64, do_sample=False)[0]["generated_text"]
    assert found == PROMPT + sample(run_dir, PROMPT, 64)
