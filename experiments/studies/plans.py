"""How a study's plan is kept beside its runs: written once, and compared ever after."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from experiments.config import Data, Model, Optimizer, Run, Sel, changes
from experiments.errors import InputError
from experiments.files import read_json, write_json

Plan = TypeVar("Plan")
_NAMED = 3
"""Differences that an error names."""


def save_plan(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a plan, or checks that the one that is there says the same.

    Args:
      path: of the file; its folder is made if need be.
      content: of a plan, as nested dicts.

    Raises:
      InputError: it does not.
    """
    if path.exists():
        there, now = read_json(path), json.loads(json.dumps(content))
        if there != now:
            found = [f"{name} is {left} there and {right} now" for name, left, right in changes(there, now)]
            more = ", ..." if len(found) > _NAMED else ""
            raise InputError(
                f"{path.parent} holds another study (see its {path.name}): "
                f"{', '.join(found[:_NAMED])}{more}; use another directory"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def load_plan(path: Path, kind: type[Plan], drop: tuple[str, ...] = ()) -> Plan:
    """What `save_plan` wrote.

    Args:
      path: of the file.
      kind: the plan's dataclass, whose `base` is a `Run`.
      drop: what else the file holds.

    Raises:
      InputError: the file is damaged.
    """
    content = read_json(path, require=("base", *drop))
    parts = {"model": Model, "data": Data, "optimizer": Optimizer, "sel": Sel}
    try:
        base = content.pop("base")
        run = Run(**base | {name: part(**base[name]) for name, part in parts.items()})
        rest = {name: _tuples(value) for name, value in content.items() if name not in drop}
        return kind(base=run, **rest)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a study's plan: {error}") from error


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value
