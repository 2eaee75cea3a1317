"""The way to transformers' tensors and back is the same function of the tokens, whatever is folded on it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Model, Run, Sel, preset
from experiments.errors import InputError
from experiments.exchange.hugging_face import from_config, from_tensors, to_config, to_tensors
from experiments.model import GPT2, init_params
from experiments.optimizers import prepare_params
from sel_jax import effective

BASE = Model(vocab_size=50, context=12, layers=3, heads=2, width=16)
MODELS = {
    "plain": BASE,
    "untied": replace(BASE, tied=False),
    "biases": replace(BASE, bias=True, gelu="tanh", layer_norm_epsilon=1e-3),
    "spectral": replace(
        BASE, parametrization="spectral", width=32, base_width=16, base_heads=2, output_scale=3.0, bias=True
    ),
    "spectral, untied": replace(
        BASE, parametrization="spectral", tied=False, width=32, base_width=16, base_heads=2
    ),
}
TOKENS = np.random.default_rng(0).integers(0, BASE.vocab_size, (2, BASE.context))


def random_params(model: Model):
    """Far from the initial ones: gains away from 1, biases from 0."""
    params = init_params(model, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return treedef.unflatten(
        x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)
    )


def logits(model: Model, params) -> np.ndarray:
    return np.asarray(GPT2(model).apply({"params": params}, jnp.asarray(TOKENS)))


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name):
    model = MODELS[name]
    params = random_params(model)
    theirs = from_config(to_config(model))
    tensors = to_tensors(model, params)
    assert all(value.dtype == np.float32 and value.flags["C_CONTIGUOUS"] for value in tensors.values())
    expected = logits(model, params)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits(theirs, from_tensors(theirs, tensors)), expected, rtol=0, atol=2e-5)


def test_curved_weights_are_folded():
    run = Run(model=BASE, optimizer=replace(preset("tiny").optimizer, name="adamw"), sel=Sel(on=True))
    params = prepare_params(random_params(BASE), run)
    theirs = from_config(to_config(BASE))
    found = logits(theirs, from_tensors(theirs, to_tensors(BASE, params)))
    np.testing.assert_allclose(found, logits(BASE, effective(params)), rtol=0, atol=2e-5)


def test_names_are_those_of_transformers():
    tensors = to_tensors(BASE, random_params(BASE))
    assert tensors["transformer.wte.weight"].shape == (50, 16)
    assert tensors["transformer.h.2.attn.c_attn.weight"].shape == (16, 48)
    assert tensors["transformer.h.0.mlp.c_proj.bias"].shape == (16,)
    assert tensors["transformer.ln_f.bias"].shape == (16,)
    assert "lm_head.weight" not in tensors


def test_what_does_not_fit_is_refused():
    tensors = to_tensors(BASE, random_params(BASE))
    theirs = from_config(to_config(BASE))
    with pytest.raises(InputError, match="lack h.1.ln_2.weight"):
        from_tensors(theirs, {k: v for k, v in tensors.items() if k != "transformer.h.1.ln_2.weight"})
    with pytest.raises(InputError, match=r"wpe.weight has shape \(12, 16\), the model wants \(13, 16\)"):
        from_tensors(replace(theirs, context=13), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "only gpt2"),
        ({"activation_function": "relu"}, "relu"),
        ({"n_inner": 7}, "n_inner 7"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_config(to_config(BASE) | change)
