"""Names of a pytree's leaves, and glob patterns on them, for params of any framework."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as `h/attn/c_attn/kernel`, without the `/value` that NNX variables end in."""
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path name, leaf) of every leaf; None and optax.MaskedNode have none and are passed over."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def match(tree: Any, patterns: Mapping[str, T]) -> dict[str, T]:
    """What each leaf's path is matched to by the first pattern that fits it.

    Args:
      tree: params of any framework.
      patterns: glob patterns on path names (`*` also crosses `/`), in order of precedence.

    Returns:
      path name -> value, for the leaves that a pattern fits, in the tree's order.

    Raises:
      ValueError: a pattern fits no leaf.
    """
    names = [name for name, _ in named_leaves(tree)]
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ValueError(f"pattern {pattern!r} matches no parameter; the parameters are: {known}")
    return first_matches(names, patterns)


def first_matches(names: Iterable[str], patterns: Mapping[str, T]) -> dict[str, T]:
    """Name -> value of the first pattern that fits it, for the names that one fits."""
    found = {}
    for name in names:
        fitting = [value for pattern, value in patterns.items() if fnmatchcase(name, pattern)]
        if fitting:
            found[name] = fitting[0]
    return found
