"""Our logits against transformers' GPT-2, built from a random configuration, with its weights in our tree."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Model
from experiments.model import GPT2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peers

CONFIG = Model(vocab_size=53, context=20, layers=3, heads=4, width=32)


def reference(config: Model):
    """A GPT2LMHeadModel whose weights make every part matter: peaked attention, gains away from 1."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            activation_function={"tanh": "gelu_new", "exact": "gelu"}[config.gelu],
            layer_norm_epsilon=config.layer_norm_epsilon,
            tie_word_embeddings=config.tied,
        )
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator)
            if "ln_" in name and name.endswith("weight"):
                parameter += 1
            if not config.bias and name.endswith("bias"):
                parameter.zero_()
    return model


def params_from(config: Model, model):
    """The weights of a GPT2LMHeadModel as our parameters; its Conv1D kernels are (in, out) like ours."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def layers(name: str):
        return np.stack([state[f"transformer.h.{layer}.{name}"] for layer in range(config.layers)])

    def module(read, name: str, weight: str):
        leaves = {weight: read(f"{name}.weight")}
        return leaves | ({"bias": read(f"{name}.bias")} if config.bias else {})

    params = {
        "wte": {"embedding": state["transformer.wte.weight"]},
        "wpe": {"embedding": state["transformer.wpe.weight"]},
        "h": {
            "ln_1": module(layers, "ln_1", "scale"),
            "attn": {part: module(layers, f"attn.{part}", "kernel") for part in ("c_attn", "c_proj")},
            "ln_2": module(layers, "ln_2", "scale"),
            "mlp": {part: module(layers, f"mlp.{part}", "kernel") for part in ("c_fc", "c_proj")},
        },
        "ln_f": module(lambda name: state[f"transformer.{name}"], "ln_f", "scale"),
    }
    if not config.tied:
        params["lm_head"] = {"kernel": state["lm_head.weight"].T}
    return params


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_equals_transformers(tied, bias, gelu):
    config = Model(**{**vars(CONFIG), "tied": tied, "bias": bias, "gelu": gelu})
    model = reference(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, config.context))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    logits = GPT2(config).apply({"params": params_from(config, model)}, jnp.asarray(tokens))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
