"""GPT-2's parameters and shape, between ours and transformers' `GPT2LMHeadModel`.

Both keep kernels as (in, out). What theirs has no place for is folded into its neighbours: weights in curved
space, the spectral parametrisation's attention scale (into the queries) and output multiplier (into the last
LayerNorm).
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.config import Model
from experiments.errors import InputError
from experiments.model import attention_scale, init_params, output_multiplier
from sel_jax import fold
from spectral.paths import map_named, named_leaves

_GELU = {"exact": "gelu", "tanh": "gelu_new"}


def to_config(model: Model) -> dict[str, Any]:
    """The contents of transformers' `config.json`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": _GELU[model.gelu],
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def from_config(config: Mapping[str, Any]) -> Model:
    """The model of a `config.json`, in GPT-2's own parametrisation.

    Raises:
      InputError: it is no GPT-2, or one that this model has no place for.
    """
    kind, gelu = config.get("model_type"), config.get("activation_function", "gelu_new")
    if kind != "gpt2":
        raise InputError(f"model_type is {kind!r}: only gpt2 can be read")
    ours = {theirs: name for name, theirs in _GELU.items()}
    if gelu not in ours:
        raise InputError(f"activation_function {gelu!r} is none of {', '.join(ours)}")
    width = config["n_embd"]
    unsupported = {
        "n_inner": config.get("n_inner") in (None, 4 * width),
        "scale_attn_weights": config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": not config.get("scale_attn_by_inverse_layer_idx", False),
        "add_cross_attention": not config.get("add_cross_attention", False),
    }
    if wrong := [name for name, supported in unsupported.items() if not supported]:
        raise InputError(
            f"{', '.join(f'{name} {config[name]!r}' for name in wrong)}: this model has no place for it"
        )
    return Model(
        vocab_size=config["vocab_size"],
        context=config["n_positions"],
        layers=config["n_layer"],
        heads=config["n_head"],
        width=width,
        bias=True,
        tied=config.get("tie_word_embeddings", True),
        gelu=ours[gelu],
        layer_norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def to_tensors(model: Model, params: Any) -> dict[str, np.ndarray]:
    """transformers' names -> float32 arrays, of the same function of the tokens.

    Args:
      model: the shape and parametrisation.
      params: of `GPT2(model)`, ordinary or reparametrised.
    """
    params = _folded(model, fold(params))
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, value: Any) -> None:
        # Their attention and MLP always have biases, and their LayerNorms too.
        tensors[name] = np.ascontiguousarray(value, np.float32)

    for path, leaf in named_leaves(params):
        theirs = _their_name(path)
        if path.startswith("h/"):
            for layer, value in enumerate(leaf):
                put(theirs.format(layer=layer), value)
        else:
            put(theirs, leaf.T if path == "lm_head/kernel" else leaf)
    if not model.bias:
        for name in list(tensors):
            if name.removesuffix(".weight").split(".")[-1] in (
                "ln_1",
                "ln_2",
                "ln_f",
                "c_attn",
                "c_proj",
                "c_fc",
            ):
                put(name.replace(".weight", ".bias"), np.zeros(tensors[name].shape[-1]))
    return tensors


def from_tensors(model: Model, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our parameters from transformers' tensors.

    Args:
      model: from `from_config`.
      tensors: as stored; with or without the `transformer.` of the names.

    Raises:
      InputError: a tensor is missing, or has another shape.
    """
    stored = {name.removeprefix("transformer."): value for name, value in tensors.items()}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        name = name.removeprefix("transformer.")
        if name not in stored:
            raise InputError(f"the weights lack {name}")
        value = np.asarray(stored[name], np.float32)
        if value.shape != shape:
            raise InputError(f"{name} has shape {value.shape}, the model wants {shape}")
        return value

    def leaf(path: str, like: Any) -> np.ndarray:
        theirs = _their_name(path)
        if path.startswith("h/"):
            return np.stack([read(theirs.format(layer=i), like.shape[1:]) for i in range(model.layers)])
        if path == "lm_head/kernel":
            return read(theirs, like.shape[::-1]).T
        return read(theirs, like.shape)

    return map_named(leaf, jax.eval_shape(lambda: init_params(model, jax.random.key(0))))


def _their_name(path: str) -> str:
    """Of a parameter of ours; `{layer}` stands for a layer's number."""
    *modules, leaf = path.split("/")
    leaf = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}[leaf]
    if modules[0] == "lm_head":
        return f"lm_head.{leaf}"
    modules = ["h", "{layer}", *modules[1:]] if modules[0] == "h" else modules
    return ".".join(["transformer", *modules, leaf])


def _folded(model: Model, params: Any) -> Any:
    """Parameters for attention scaled by 1 / sqrt(head size) and for logits that nothing multiplies."""
    queries = attention_scale(model) * (model.width // model.heads) ** 0.5
    output = output_multiplier(model) if model.tied else 1.0

    def change(path: str, leaf: Any) -> Any:
        if path.startswith("h/attn/c_attn/"):
            factors = np.ones(leaf.shape[-1], np.float32)
            factors[: model.width] = queries
            return leaf * factors
        return leaf * np.float32(output) if path.startswith("ln_f/") else leaf

    return map_named(change, params)
