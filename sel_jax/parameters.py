"""Whole trees of parameters: into curved weight space, to ordinary weights, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from sel_jax.inverse import invert
from sel_jax.symexplin import SCALES, Rule, SymExpLin, check_names
from sel_jax.weights import SelWeight, scale_shapes, start_factors
from spectral.dimensions import KERNEL, axes, fans
from spectral.paths import map_named, match

Start = Literal["mismatched", "exact", "anchored"]
STARTS: tuple[Start, ...] = get_args(Start)
_FIELDS = {"raw", "scales", "residual", "anchor"}
Where = str | Sequence[str] | Mapping[str, MuonDimensionNumbers | None]

CURVATURE = 1.0
"""Default of beta times the weights' standard deviation, found by `python -m experiments sel --calibrate`."""
_LEAST_BETA = 1.5


def beta_for(std: float, curvature: float = CURVATURE) -> float:
    """max(1.5, curvature / std): the beta that is felt by weights of a given size.

    From 1 down, the mismatch map has no inverse: negative raw weights would give positive ones.

    Args:
      std: the weights' standard deviation.
      curvature: beta |w| of a weight of that size. Well below 1, the map is nearly linear.

    Raises:
      ValueError: an argument is not positive and finite.
    """
    for name, value in {"std": std, "curvature": curvature}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    return max(_LEAST_BETA, curvature / std)


def default_beta(width: int) -> float:
    """`beta_for` weights of standard deviation 1 / sqrt(width), as most initialisers draw them."""
    return beta_for(width**-0.5)


def reparametrize(
    params: Any,
    where: Where,
    *,
    beta: float | Callable[[int], float] = default_beta,
    rule: Rule = "mismatch",
    start: Start = "mismatched",
    learn: Sequence[str] = SCALES,
    values: Mapping[str, float] | None = None,
    rank: int = 0,
    key: Array | None = None,
) -> Any:
    """Replaces weights by `SelWeight` nodes; `effective` gives a model its ordinary weights again.

    Args:
      params: params of any framework; each matrix of a stack is treated on its own.
      where: which leaves: glob patterns on paths such as `h/*/kernel`, or a mapping from them to dimension
        numbers (None: vectors, along the last axis). Without those, arrays with two or more axes are
        kernels `(..., in, out)`, and others are vectors.
      beta: the map's curvature, or a function of the width, which is a matrix's fan_in and a vector's length.
        The default is for weights of standard deviation 1 / sqrt(width); `beta_for` gives that of others.
      rule: the map's.
      start: `mismatched` is the paper's initialisation, for fresh weights: the congruent rule is inverted,
        so that under the mismatch rule negative weights start smaller than drawn, and the function changes.
        `exact` inverts the map itself, for trained weights: the function stays, to float32's accuracy.
        `anchored` keeps it to the bit, for two more arrays of the weights' size.
      learn: the scales that are arrays to be trained; the others are constants.
      values: name -> value of a scale, at the start or for good, instead of e = l = m = 1 and n = 0.
      rank: of the low-rank residual; 0 has none.
      key: a PRNG key, for the residual's factor that does not start at 0.

    Returns:
      The tree with nodes in the places of those leaves. Raw weights are float32; the effective ones keep
      the leaves' dtype.

    Raises:
      ValueError: a pattern fits no leaf; a name of a scale or `start` is unknown; the rank exceeds a
        matrix's, or a vector's residual is asked for; beta is not positive; the map is not invertible.
      TypeError: a leaf that fits is not floating; a rank without a key.
    """
    if start not in STARTS:
        raise ValueError(f"unknown start {start!r}: choose one of {', '.join(STARTS)}")
    check_names(learn)
    check_names(values := values or {})
    if rank and key is None:
        raise TypeError("a residual needs a PRNG key: pass key=jax.random.key(...)")
    found = match(params, _patterns(where), "where's pattern")
    keys = (
        dict(zip(found, jax.random.split(key, len(found)), strict=True)) if rank and key is not None else {}
    )

    def node(name: str, leaf: Array) -> Any:
        if name not in found:
            return leaf
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"{name} is {jnp.result_type(leaf)}: only floating weights can be reparametrised")
        try:
            dimensions = _dimensions(leaf.shape, found[name])
            width = math.prod(leaf.shape[-1:]) if dimensions is None else fans(leaf.shape, dimensions)[0]
            config = SymExpLin(beta(width) if callable(beta) else beta, rule, **values)
            raw = invert(leaf, config, rule="congruent" if start == "mismatched" else rule)
        except ValueError as error:
            raise ValueError(f"{name}, of shape {leaf.shape}: {error}") from error
        return SelWeight(
            raw=raw,
            scales={scale: _factors(leaf.shape, dimensions, config, scale) for scale in learn},
            residual=_residual(name, leaf.shape, dimensions, rank, keys[name]) if rank else None,
            # Copies: an optimiser step may donate the buffers of the raw weights, and of all the tree.
            anchor={"weight": jnp.array(leaf, jnp.float32), "raw": jnp.array(raw)}
            if start == "anchored"
            else None,
            config=config,
            dimensions=dimensions,
            dtype=str(leaf.dtype),
        )

    return map_named(node, params)


def effective(params: Any) -> Any:
    """The ordinary weights: every `SelWeight` becomes its array; the rest stays."""
    return _map_nodes(SelWeight.effective, params)


def fold(params: Any) -> Any:
    """`effective`, once, after training: plain arrays that an ordinary model takes, at no cost."""
    return jax.jit(effective)(params)


def unfold(weights: Any, like: Any) -> Any:
    """The inverse of `fold`: nodes with the scales of `like` whose effective weights are the given ones.

    Args:
      weights: a tree of ordinary weights.
      like: a reparametrised tree of the same model.

    Raises:
      ValueError: a shape differs, or a map is not invertible (named by its path).
    """

    def node(path: Any, old: Any, weight: Any) -> Any:
        if not isinstance(old, SelWeight):
            return weight
        try:
            return old.with_effective(weight)
        except ValueError as error:
            # An NNX variable holds its array under `value`; its own name is the one that people know.
            name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
            raise ValueError(f"{name}, of shape {weight.shape}: {error}") from error

    return jax.tree_util.tree_map_with_path(node, like, weights, is_leaf=_is_node)


def labels(params: Any) -> Any:
    """What every leaf is, for `optax.partition` and masks, in a tree of the same structure.

    Args:
      params: a reparametrised tree, or updates or gradients of one; or a tree with nodes taken apart into
        mappings with the names of their fields, as in an `nnx.State`.

    Returns:
      `raw`, `residual` or `anchor`; for a scale its name, `e`, `l`, `m` or `n`; for other leaves `other`.
    """

    def label(path: Any, _: Any) -> str:
        field, scale = (jax.tree_util.keystr(path[i : i + 1], simple=True) for i in (0, 1))
        return scale if field == "scales" else field

    def is_node(x: Any) -> bool:
        return _is_node(x) or isinstance(x, Mapping) and "raw" in x and _FIELDS.issuperset(x)

    return jax.tree.map(
        lambda x: jax.tree_util.tree_map_with_path(label, x) if is_node(x) else "other",
        params,
        is_leaf=is_node,
    )


def decay_mask(params: Any) -> Any:
    """Where weight decay makes sense: everywhere but on scales and anchors. A mask for optax."""
    return jax.tree.map(lambda label: label not in (*SCALES, "anchor"), labels(params))


def _is_node(x: Any) -> bool:
    return isinstance(x, SelWeight)


def _map_nodes(function: Callable[[SelWeight], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: function(x) if _is_node(x) else x, tree, is_leaf=_is_node)


def _patterns(where: Where) -> dict[str, MuonDimensionNumbers | str | None]:
    """Glob pattern -> dimension numbers; the word `default` where they follow from the shape."""
    if isinstance(where, Mapping):
        return dict(where)
    return dict.fromkeys([where] if isinstance(where, str) else where, "default")


def _dimensions(
    shape: tuple[int, ...], given: MuonDimensionNumbers | str | None
) -> MuonDimensionNumbers | None:
    if given == "default":
        given = KERNEL if len(shape) >= 2 else None
    if given is None:
        return None
    # Counted from the last, they stay right when `nn.scan` or `vmap` puts an axis in front.
    _, inputs, outputs = axes(shape, given)
    return MuonDimensionNumbers(*(tuple(axis - len(shape) for axis in side) for side in (inputs, outputs)))


def _factors(
    shape: tuple[int, ...], dimensions: MuonDimensionNumbers | None, config: SymExpLin, scale: str
) -> tuple[Array, ...]:
    shapes = scale_shapes(shape, dimensions)
    starts = start_factors(config, scale, len(shapes))
    return tuple(jnp.full(shape, start, jnp.float32) for shape, start in zip(shapes, starts, strict=True))


def _residual(
    name: str, shape: tuple[int, ...], dimensions: MuonDimensionNumbers | None, rank: int, key: Array
) -> dict[str, Array]:
    """B starts at 0, A with entries of standard deviation 1 / sqrt(fan_in), as in LoRA."""
    if dimensions is None:
        raise ValueError(f"{name}, of shape {shape}, is a vector: it has no low-rank residual (rank={rank})")
    fan_in, fan_out = fans(shape, dimensions)
    if not 0 < rank <= min(fan_in, fan_out):
        raise ValueError(
            f"{name}, of shape {shape}: rank {rank} must be from 1 to {min(fan_in, fan_out)}, its own"
        )
    batch = tuple(shape[axis] for axis in axes(shape, dimensions)[0])
    a = jax.random.normal(key, (*batch, rank, fan_out), jnp.float32) / math.sqrt(fan_in)
    return {"b": jnp.zeros((*batch, fan_in, rank), jnp.float32), "a": a}
