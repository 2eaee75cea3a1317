"""Names of a pytree's leaves, and glob patterns on them, for params of any framework."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf, in the tree's order.

    A name is the leaf's path, like `h/attn/c_attn/kernel`. That of an NNX variable, or of a Linen box such as
    `nn.Partitioned`, is its own, without the `/value` under which it holds its array. None and
    optax.MaskedNode have no leaves and are passed over.
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_flax_box)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, node in nodes
        for leaf in jax.tree.leaves(node)
    ]


def _is_flax_box(node: Any) -> bool:
    # By name, since this package does not import Flax.
    return any(
        cls.__module__.startswith("flax.") and cls.__name__ in ("Variable", "VariableState", "AxisMetadata")
        for cls in type(node).__mro__
    )


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`function(name, leaf, *others)` on every leaf of tree, with the leaves of rest in its places."""
    names = iter([name for name, _ in named_leaves(tree)])
    return jax.tree.map(lambda leaf, *others: function(next(names), leaf, *others), tree, *rest)


def match(tree: Any, patterns: Mapping[str, T], what: str = "pattern") -> dict[str, T]:
    """What each leaf's name is matched to by the first pattern that fits it.

    Args:
      tree: params of any framework; a tree without leaves (optax's placeholder, say) fits any patterns.
      patterns: glob patterns on names (`*` also crosses `/`), in order of precedence.
      what: what an error calls a pattern.

    Returns:
      name -> value, for the leaves that a pattern fits, in the tree's order.

    Raises:
      ValueError: a pattern fits no leaf, or two leaves have one name.
    """
    names = [name for name, _ in named_leaves(tree)]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"more than one parameter is called {', '.join(sorted(repeated))}: rename the keys")
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ValueError(f"{what} {pattern!r} matches no parameter; the parameters are: {known}")
    return first_matches(names, patterns)


def first_matches(names: Iterable[str], patterns: Mapping[str, T]) -> dict[str, T]:
    """Name -> value of the first pattern that fits it, for the names that one fits."""
    return {
        name: next(value for pattern, value in patterns.items() if fnmatchcase(name, pattern))
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
