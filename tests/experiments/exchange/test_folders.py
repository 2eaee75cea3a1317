"""Models exported from runs, and runs that start from models."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.config import Sel
from experiments.errors import InputError
from experiments.exchange.folders import export_run, import_model, load_run, read_model
from experiments.metrics import read_metrics
from experiments.train import train
from tests.experiments.exchange.runs import SETTINGS, with_text


def evaluations(run_dir) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir) if line["kind"] == "eval"]


def test_the_folder(model_dir):
    names = {path.name for path in model_dir.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    vocabulary = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["a"] == 97 and vocabulary["Ġ"] == 32  # GPT-2's character for a space


@pytest.mark.parametrize("sel", [False, True], ids=["plain", "curved"])
def test_a_run_that_starts_from_a_model(run_dir, model_dir, tmp_path, sel):
    """It starts where the exported one ended, and learns on; started again, it has ended."""
    settings = replace(with_text(SETTINGS, tmp_path), sel=Sel(on=sel), steps=30)
    config = import_model(model_dir, tmp_path / "run", settings)
    assert config.model.bias  # transformers' always has them
    result = train(config, tmp_path / "run", progress=False)
    first, *_, last = evaluations(tmp_path / "run")
    assert first == pytest.approx(evaluations(run_dir)[-1], abs=1e-5)
    assert last < first and result.status == "finished"
    assert train(config, tmp_path / "run", progress=False) == result


def test_a_manifold_is_entered(model_dir, tmp_path):
    settings = with_text(SETTINGS, tmp_path).with_optimizer("hetero")
    import_model(model_dir, tmp_path / "run", settings)
    _, state = load_run(tmp_path / "run")
    for w in np.asarray(state.params["h"]["attn"]["c_attn"]["kernel"], np.float64):
        np.testing.assert_allclose(w @ w.T, np.eye(16), atol=1e-5)


def test_refusals(run_dir, model_dir, tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        export_run(tmp_path, tmp_path / "model")
    with pytest.raises(InputError, match="holds a model already"):
        export_run(run_dir, model_dir)
    with pytest.raises(InputError, match="lacks config.json"):
        read_model(tmp_path)
    with pytest.raises(InputError, match="is not empty"):
        import_model(model_dir, run_dir, SETTINGS)


def test_pickles_are_not_read_and_damage_is_told(model_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match="lacks model.safetensors"):
        read_model(tmp_path)
    whole = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged"):
        read_model(tmp_path)
