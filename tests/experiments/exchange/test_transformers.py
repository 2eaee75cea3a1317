"""transformers loads an exported model: the same logits, the same text."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exchange.folders import export_run, load_run
from experiments.model import GPT2
from experiments.sample import sample
from tests.experiments.exchange.runs import SETTINGS, trained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peers
PROMPT = "def é"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(SETTINGS, tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def model_dir(run_dir):
    export_run(run_dir, run_dir.parent / "model")
    return run_dir.parent / "model"


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
