"""SymExpLin for Flax NNX: a wrapper that any module can be put into, and the way back to plain modules."""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

import sel_jax
from sel_jax.parameters import Where
from sel_jax.weights import SelWeight

Path = tuple[Any, ...]
"""Keys of mappings, places in sequences and names of attributes."""


class Anchor(nnx.Variable):
    """What `start="anchored"` adds to: not an `nnx.Param`, so that no gradient is taken by it."""


class Reparametrized(nnx.Module):
    """Runs a layer under the effective weights of `SelWeight` nodes, which it holds in the weights' places.

    Each of a node's arrays is an `nnx.Param` of its own, named like `layer/kernel/raw` and
    `layer/kernel/scales/e/0`; `sel_jax.labels`, `decay_mask` and `scale_rates` know them by these names, in
    an `nnx.Optimizer` too. A weight's metadata (its sharding, say) passes to the raw weights.

    A call runs a view of the layer: new module objects around the same Variables, so that statistics and
    random streams move on as ever. Only Variables that the layer creates while it runs (by `sow`) are lost.

    Args:
      layer: any module, a whole model too; its `__call__` is run, with all arguments handed on. It is
        copied, as by `nnx.clone`: the one passed stays as it is, and shares no Variable with the wrapper.
      where: which of its Params, by their paths within it (`*kernel`): see `sel_jax.reparametrize`.
      rngs: draws the residual's key from its `params` stream; needed if `rank` is given.
      **options: the others of `sel_jax.reparametrize`: beta, rule, start, learn, values, rank.

    Raises:
      ValueError: whatever `reparametrize` refuses (a pattern that fits no Param, say), or a Param that
        fits is held by two modules of the layer.
      TypeError: a rank without rngs.

    Source: the interface is that of Flax's `nnx.WeightNorm`.
    """

    def __init__(self, layer: nnx.Module, where: Where, *, rngs: nnx.Rngs | None = None, **options: Any):
        key = None
        if options.get("rank"):
            if rngs is None:
                raise TypeError("a residual needs a PRNG key: pass rngs=nnx.Rngs(...)")
            key = rngs.params()
        self.layer = nnx.clone(layer)
        plain = dict(nnx.to_flat_state(nnx.state(self.layer, nnx.Param)))
        nodes = sel_jax.reparametrize(nnx.state(self.layer, nnx.Param), where, key=key, **options)
        paths = []
        for path, variable in nnx.to_flat_state(nodes):
            if isinstance(variable.get_raw_value(), SelWeight):
                _put(self.layer, path, _variables(variable.get_raw_value(), plain[path]))
                paths.append(path)
        self.paths = tuple(paths)
        left = {id(variable) for _, variable in nnx.to_flat_state(nnx.state(self.layer, nnx.Param))}
        if shared := [path for path in paths if id(plain[path]) in left]:
            names = ", ".join("/".join(map(str, path)) for path in shared)
            raise ValueError(f"{names}: held by two modules; let them share the module that holds it")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output under its effective weights."""
        view = nnx.merge(*nnx.split(self.layer))
        return _with_arrays(view, self.paths, sel_jax.effective)(*args, **kwargs)


def fold(module: nnx.Module) -> nnx.Module:
    """A plain copy, after training: every `Reparametrized` in it becomes its layer, with ordinary weights.

    Args:
      module: a `Reparametrized`, or any module that holds some; it stays as it is.

    Returns:
      A module that shares no Variable with the given one.
    """
    module = nnx.clone(module)
    nodes = [node for _, node in nnx.iter_graph(module)]
    for node in nodes:
        for key, child in _children(node):
            if isinstance(child, Reparametrized):
                _put(node, (key,), child.layer)
    for node in nodes:
        if isinstance(node, Reparametrized):
            _with_arrays(node.layer, node.paths, sel_jax.fold)
    return module.layer if isinstance(module, Reparametrized) else module


def _variables(node: SelWeight, plain: nnx.Variable) -> SelWeight:
    """The node with a Variable around each array; the raw weights' is of the plain weight's kind."""
    held = jax.tree.map(nnx.Param, node)
    anchor = None if node.anchor is None else jax.tree.map(Anchor, node.anchor)
    return replace(held, raw=plain.copy(node.raw), anchor=anchor)


def _with_arrays(
    layer: nnx.Module, paths: Sequence[Path], to_array: Callable[[SelWeight], Any]
) -> nnx.Module:
    """Puts ordinary weights in the nodes' places, in the layer itself."""
    for path in paths:
        node = _get(layer, path)
        _put(layer, path, node.raw.copy(to_array(nnx.as_pure(node))))
    return layer


def _children(node: Any) -> list[tuple[str | int, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list | tuple | nnx.List):
        return list(enumerate(node))
    return list(vars(node).items()) if isinstance(node, nnx.Pytree) else []


def _get(node: Any, path: Path) -> Any:
    for key in path:
        node = node[key] if isinstance(node, Mapping | Sequence) else getattr(node, key)
    return node


def _put(node: Any, path: Path, value: Any) -> None:
    parent = _get(node, path[:-1])
    if isinstance(parent, MutableMapping | MutableSequence):
        parent[path[-1]] = value
    else:
        setattr(parent, path[-1], nnx.data(value))
