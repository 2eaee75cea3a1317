"""SymExpLin for Flax Linen: a wrapper that any module can be put into."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.linen import meta
from jaxtyping import Array

from sel_jax.parameters import Start, Where, default_beta, effective, reparametrize
from sel_jax.symexplin import SCALES, Rule


class Reparametrized(nn.Module):
    """Runs a layer whose params hold `SelWeight` nodes in the places of the matched weights.

    The params are those that `reparametrize` makes of the plain layer's, and lie where the plain layer's
    would: under its own name, or under `layer` where the wrapper is the outermost module. So the functions
    on trees, `fold`, `labels`, `decay_mask`, take a model's params as they are, and what `fold` gives is
    the plain model's params.

    Inside `nn.scan` a node has no layer axis, like any weight there; its arrays are stacked like others.
    Where the plain weight comes in a box with its axes' names (`nn.with_partitioning`,
    `nn.with_logical_partitioning`), so does each of its node's arrays; take them out, as ever, by `nn.unbox`.
    A layer that also runs outside of its wrapper would meet nodes there and fail.

    Attributes:
      layer: any module, a whole model too; its `__call__` is run, with all arguments handed on.
      where: which of its params, by their paths within it (`*kernel`); as are the others, see
        `sel_jax.reparametrize`.
      beta: the map's curvature, or a function of the width.
      rule: the map's.
      start: how raw weights are found.
      learn: the scales to be trained.
      values: name -> value of a scale, instead of the default.
      rank: of the low-rank residual, whose key is drawn from the `params` stream.

    Raises:
      ValueError: at `init`, whatever `reparametrize` refuses: a pattern that fits no param, say.

    Source: the construction is that of Flax's `nn.WeightNorm`.
    """

    layer: nn.Module
    where: Where
    beta: float | Callable[[int], float] = default_beta
    rule: Rule = "mismatch"
    start: Start = "mismatched"
    learn: Sequence[str] = SCALES
    values: Mapping[str, float] | None = None
    rank: int = 0

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output under its effective weights."""
        made: list[Any] = []

        def to_nodes(variables: Mapping[str, Any]) -> Mapping[str, Any]:
            # Flax calls this twice: on the weights just drawn, and on the effective ones after the run, which
            # must not be reparametrised once more.
            if not made:
                made.append({name: self._nodes(tree) for name, tree in variables.items()})
            return made[0]

        return nn.map_variables(
            lambda layer: layer(*args, **kwargs),
            "params",
            trans_in_fn=lambda variables: effective(meta.unbox(variables)),
            trans_out_fn=to_nodes,
            # Once: a wrapper that is run twice finds its nodes.
            init=self.is_initializing() and "params" not in self.layer.variables,
        )(self.layer)

    def _nodes(self, params: Any) -> Any:
        nodes = reparametrize(
            meta.unbox(params),
            self.where,
            beta=self.beta,
            rule=self.rule,
            start=self.start,
            learn=self.learn,
            values=self.values,
            rank=self.rank,
            key=self.make_rng("params") if self.rank else None,
        )
        return jax.tree.map(_boxed_like, params, nodes, is_leaf=meta.is_axis_metadata)


def _boxed_like(plain: Any, new: Any) -> Any:
    """The new weight or node, its arrays boxed as the plain weight is (if it is).

    An axis of the size that the weight has in the same place keeps the weight's name for it; the axes of
    length 1 of scales, and a residual's rank, have none.
    """
    if not meta.is_axis_metadata(plain):
        return new
    (weight,) = jax.tree.leaves(plain)
    shape = weight.shape

    def boxed(x: Array) -> Any:
        if x.shape == shape:
            return plain.replace_boxed(x)
        if not isinstance(plain, nn.Partitioned) or x.ndim != len(shape):
            return x
        names = (*plain.names, *[None] * (len(shape) - len(plain.names)))
        kept = (name if a == b else None for name, a, b in zip(names, x.shape, shape, strict=True))
        return plain.replace(value=x, names=tuple(kept))

    return jax.tree.map(boxed, new)
