"""A run's folder: files that are there whole or not at all, and `config.json`, which says whose it is."""

import fcntl
import json
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from experiments.config import Run, differences, to_dict
from experiments.corpus import Corpus
from experiments.errors import InputError

CONFIG, METRICS, RESULT, LOCK = "config.json", "metrics.jsonl", "result.json", "lock"
PACKAGES = ("weight-geometry", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader, or a kill, finds the old contents or the new, never a part.

    Args:
      path: the file; its folder must exist.
      content: the new contents; text is written as UTF-8.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
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


def read_json(path: Path, require: Sequence[str] = ()) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      InputError: the file is damaged, or lacks a required key.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    missing = [key for key in require if not isinstance(content, dict) or key not in content]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}")
    return content


_LINE_FIELDS = {"train": "loss", "eval": "loss", "speed": "tokens_per_second"}


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of a metrics file, and whether a last one that a kill cut short was left out.

    Args:
      path: the file; where there is none there are no lines.

    Raises:
      InputError: another line is damaged.
    """
    if not path.exists():
        return [], False
    raw = path.read_bytes().splitlines()
    lines = []
    for number, text in enumerate(raw, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(raw):
                return lines, True
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        # A cut object never parses, so a line that parses but lacks a field is wrong wherever it stands.
        if not isinstance(line, dict) or not {"kind", "step"} <= line.keys():
            raise InputError(f"{path}, line {number}: expected an object with `kind` and `step`")
        needed = _LINE_FIELDS.get(line["kind"], "step")
        if needed not in line:
            raise InputError(f"{path}, line {number}: a line of kind {line['kind']!r} needs `{needed}`")
        lines.append(line)
    return lines, False


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from training in a folder; the lock ends with the process, however that ends.

    Raises:
      InputError: another one does.
    """
    with (run_dir / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{run_dir} is being trained by another process: wait until it has ended, or stop it"
            ) from error
        yield


def check_config(config: Run, run_dir: Path) -> None:
    """Checks that the folder is new, or holds a run with this configuration.

    Raises:
      InputError: the configuration differs, or the folder holds something else.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir} is a file: name a folder for the run")
    if not (run_dir / CONFIG).exists():
        if strangers := [name for name in ("checkpoints", METRICS, RESULT) if (run_dir / name).exists()]:
            raise InputError(f"{run_dir} has {', '.join(strangers)} but no {CONFIG}: use another directory")
        return
    stored = read_json(run_dir / CONFIG, require=("config",))["config"]
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
    stored = read_json(run_dir / CONFIG, require=("corpus",))
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
