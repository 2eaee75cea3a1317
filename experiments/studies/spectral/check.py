"""Coordinate checks of GPT-2, kept in files."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from experiments.config import Model, Run
from experiments.corpus import Corpus, train_batches
from experiments.errors import InputError
from experiments.files import read_json, write_json
from experiments.model import GPT2, init_params
from experiments.optimizers import make_optimizer
from experiments.studies.spectral.plan import Check, SpectralStudy
from experiments.train import mean_loss
from spectral import CoordinateCheck, coordinate_check

LOGITS = "logits"


def gpt2_features(config: Model) -> Callable[[Any, Array], Mapping[str, Array]]:
    """(params, tokens (B, T + 1)) -> name -> features: of the first, middle and last block, and the logits.

    A block's are the heads' outputs, the hidden layer of its MLP after the GELU, and the residual stream
    after it.
    """

    def features(params: Any, tokens_BxT: Array) -> dict[str, Array]:
        logits, sown = GPT2(config).apply({"params": params}, tokens_BxT[:, :-1], mutable=["probes"])
        blocks = sown["probes"]["h"]
        found = {}
        for layer in sorted({0, config.layers // 2, config.layers - 1}):
            found[f"h{layer} heads"] = blocks["attn"]["c_proj_input"][0][layer]
            found[f"h{layer} hidden"] = blocks["mlp"]["c_proj_input"][0][layer]
            found[f"h{layer} stream"] = blocks["stream"][0][layer]
        return found | {LOGITS: logits}

    return features


def gpt2_probe(config: Run) -> tuple:
    """A run's model for `spectral.coordinate_check`: params, features, loss and optimizer."""
    model = config.model
    params = init_params(model, jax.random.key(config.seed))
    return params, gpt2_features(model), partial(mean_loss, GPT2(model)), make_optimizer(config)


def run_check(study: SpectralStudy, check: Check, corpus: Corpus, study_dir: Path) -> CoordinateCheck:
    """Makes a coordinate check, or reads what an earlier call wrote.

    Args:
      study: the plan.
      check: which of its checks.
      corpus: the text, of which one batch is used throughout.
      study_dir: where its file goes.
    """
    if (stored := read_check(study_dir, check, corpus.fingerprint)) is not None:
        return stored
    (tokens,) = train_batches(
        corpus,
        batch_size=study.base.data.batch_size // study.base.data.accumulation,
        context=study.base.model.context,
        seed=study.base.seed,
        start_step=0,
        stop_step=1,
    )
    found = coordinate_check(
        lambda width, seed: gpt2_probe(study.check_config(check, width, seed)),
        study.check_widths,
        batch=jax.device_put(tokens),
        steps=study.check_steps,
        seeds=range(study.check_seeds),
    )
    content = {"fingerprint": corpus.fingerprint, **asdict(found)}
    for kind in ("features", "changes"):
        content[kind] = {name: _finite(values) for name, values in content[kind].items()}
    write_json(_path(study_dir, check), content)
    return found


def read_check(study_dir: Path, check: Check, fingerprint: str | None = None) -> CoordinateCheck | None:
    """What `run_check` wrote; None if it has not yet.

    Args:
      study_dir: where its file is.
      check: which.
      fingerprint: of the text that it must be on; None takes any.

    Raises:
      InputError: the file is damaged, or the check was made on another text.
    """
    path = _path(study_dir, check)
    if not path.exists():
        return None
    content = read_json(path, require=("fingerprint", "widths", "features", "changes"))
    if fingerprint not in (None, content["fingerprint"]):
        raise InputError(
            f"{path} is a check on another text (fingerprint {content['fingerprint']}, now {fingerprint}): "
            "use another directory"
        )
    try:
        arrays = [
            {name: np.array(values, np.float64) for name, values in content[kind].items()}
            for kind in ("features", "changes")
        ]
        shapes = {values.shape for kind in arrays for values in kind.values()}
        ((widths, _),) = shapes
        if LOGITS not in arrays[0] or widths != len(content["widths"]):
            raise ValueError("logits or widths are missing")
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a coordinate check: {error}") from error
    return CoordinateCheck(tuple(content["widths"]), *arrays)


def _path(study_dir: Path, check: Check) -> Path:
    return study_dir / f"{check.name}.json"


def _finite(values: np.ndarray) -> list[list[float | None]]:
    """As JSON has it, without numbers that are not finite; NumPy reads None as NaN."""
    return [[value if np.isfinite(value) else None for value in row] for row in values.tolist()]
