"""Runs written as transformers' model folders, and such folders taken as the start of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from experiments.checkpoints import Checkpoints, on_default_device
from experiments.config import Model, Run, from_dict
from experiments.corpus import load
from experiments.errors import InputError
from experiments.exchange import hugging_face
from experiments.exchange.byte_tokenizer import tokenizer
from experiments.files import CONFIG, read_json, write_config, write_json, write_whole
from experiments.optimizers import make_optimizer
from experiments.train import TrainState, init_state

_WEIGHTS, _SHAPE = "model.safetensors", "config.json"


def stored_config(run_dir: Path) -> Run:
    """The configuration that a run's folder holds.

    Raises:
      InputError: it holds no run, or one of another version.
    """
    if not (run_dir / CONFIG).exists():
        raise InputError(f"{run_dir} holds no run: there is no {CONFIG} in it")
    return from_dict(read_json(run_dir / CONFIG, require=("config",))["config"])


def load_run(run_dir: Path) -> tuple[Run, TrainState]:
    """A run's configuration and the state of its latest checkpoint.

    Raises:
      InputError: the folder holds no run, or one without a checkpoint.
    """
    config = stored_config(run_dir)
    state = jax.eval_shape(lambda: init_state(config, make_optimizer(config)))
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        if checkpoints.latest_step is None:
            raise InputError(f"{run_dir} has no checkpoint yet")
        return config, checkpoints.restore(on_default_device(state))


def export_run(run_dir: Path, out_dir: Path) -> None:
    """Writes a run's model as a folder that `GPT2LMHeadModel.from_pretrained` loads.

    Of a model of bytes there is a tokenizer with it.

    Args:
      run_dir: of the run; its latest checkpoint counts.
      out_dir: a folder, made if it is not there.

    Raises:
      InputError: there is no such run, or a model in `out_dir` already.
    """
    config, state = load_run(run_dir)
    if (out_dir / _WEIGHTS).exists() or (out_dir / _SHAPE).exists():
        raise InputError(f"{out_dir} holds a model already: name another folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer(config.model.context).items() if config.model.vocab_size == 256 else ():
        write_json(out_dir / name, content)
    write_json(out_dir / _SHAPE, hugging_face.to_config(config.model))
    tensors = hugging_face.to_tensors(config.model, jax.device_get(state.params))
    write_whole(out_dir / _WEIGHTS, save(tensors, metadata={"format": "pt"}))


def read_model(model_dir: Path) -> tuple[Model, dict[str, Any]]:
    """Shape and parameters of a GPT-2 in a folder of transformers'.

    Raises:
      InputError: it is none, or its weights are in another format: pickles are not read, as they run code.
    """
    for name in (_SHAPE, _WEIGHTS):
        if not (model_dir / name).exists():
            raise InputError(f"{model_dir} lacks {name}: give a folder as `save_pretrained` writes it")
    model = hugging_face.from_config(read_json(model_dir / _SHAPE))
    try:
        tensors = load_file(model_dir / _WEIGHTS)
    except SafetensorError as error:
        raise InputError(f"{model_dir / _WEIGHTS} is damaged: {error}") from error
    return model, hugging_face.from_tensors(model, tensors)


def import_model(model_dir: Path, run_dir: Path, settings: Run) -> Run:
    """Makes a run that starts from a model of transformers' instead of random weights.

    Matrices are put on the manifolds of the run's optimizer, which changes them; with SEL, raw weights are
    found for which the model is the same function.

    Args:
      model_dir: with `config.json` and `model.safetensors`.
      run_dir: of the run, a new folder; `train` with the same settings goes on from there.
      settings: of the run; the model's shape is replaced by that of the folder.

    Returns:
      The settings with that shape.

    Raises:
      InputError: there is no such model, `run_dir` is in use, or the settings do not fit.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise InputError(f"{run_dir} is not empty: name a new folder for the run")
    model, params = read_model(model_dir)
    model = replace(model, compute_dtype=settings.model.compute_dtype, remat=settings.model.remat)
    config = replace(settings, model=model, sel=replace(settings.sel, start="congruent"))
    corpus = load(config.data.corpus, vocab_size=model.vocab_size, context=model.context)
    params = jax.tree.map(np.asarray, params)
    optimizer = make_optimizer(config)
    state = jax.jit(lambda params: init_state(config, optimizer, params))(params)
    write_config(config, corpus, run_dir)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(0, state)
    return config
