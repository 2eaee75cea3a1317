"""A run's folder: files that are there whole or not at all, and `config.json`, which says whose it is."""

import json
import os
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from experiments.config import Run, differences, to_dict
from experiments.corpus import Corpus
from experiments.errors import InputError

CONFIG, RESULT = "config.json", "result.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a kill, finds the old contents or the new, never a part.

    Args:
      path: the file; its folder must exist.
      text: the new contents.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The new name must survive a power cut too, and it is the folder that holds it.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, whole (see `write_whole`).

    Raises:
      ValueError: a number in it is not finite.
    """
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The value that a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def check_config(config: Run, run_dir: Path) -> None:
    """Checks that the folder is new, or holds a run with this configuration.

    Raises:
      InputError: the configuration differs, or the folder holds something else.
    """
    if not (run_dir / CONFIG).exists():
        if strangers := [
            name for name in ("checkpoints", "metrics.jsonl", RESULT) if (run_dir / name).exists()
        ]:
            raise InputError(f"{run_dir} has {', '.join(strangers)} but no {CONFIG}: use another directory")
        return
    stored = read_json(run_dir / CONFIG)["config"]
    if changes := differences(stored, json.loads(json.dumps(to_dict(config)))):
        raise InputError(
            f"{run_dir} holds a run with another configuration (there -> here): {'; '.join(changes)}. "
            "Use another directory, or the same configuration to continue that run"
        )


def check_corpus(corpus: Corpus, run_dir: Path) -> None:
    """Checks that the folder is new, or holds a run on this text; warns if its environment differs.

    Raises:
      InputError: the text differs.
    """
    if not (run_dir / CONFIG).exists():
        return
    stored = read_json(run_dir / CONFIG)
    if stored["corpus"]["fingerprint"] != corpus.fingerprint:
        raise InputError(
            f"{run_dir} holds a run on another text: {stored['corpus']['description']} (fingerprint "
            f"{stored['corpus']['fingerprint']}), now {corpus.description} ({corpus.fingerprint}). "
            "Use another directory, or the same text to continue that run"
        )
    environment = _environment()
    if changes := differences({key: stored.get(key) for key in environment}, environment):
        warnings.warn(
            f"{run_dir} was begun in another environment, so results may differ in the last digits "
            f"(there -> here): {'; '.join(changes)}",
            stacklevel=3,
        )


def write_config(config: Run, corpus: Corpus, run_dir: Path) -> None:
    """Writes `config.json`, with all that the run depends on, unless it is there."""
    if (run_dir / CONFIG).exists():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    text = {"fingerprint": corpus.fingerprint, "description": corpus.description}
    write_json(
        run_dir / CONFIG, {"config": to_dict(config), "seed": config.seed, "corpus": text, **_environment()}
    )


def _environment() -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }
