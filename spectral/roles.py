"""What each leaf of a params tree is, and which of its axes count: decided by declarations, then by names."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from spectral.dimensions import KERNEL, DimensionNumbers, axes
from spectral.paths import first_matches, match, named_leaves
from spectral.rules import Role, gaussian_sigma

Roles = Mapping[str, Role]
"""Glob patterns on parameter paths -> role; the first pattern that fits a path decides."""


class Hints(TypedDict):
    """The keyword arguments of `decide`, to be handed on together."""

    roles: Roles | None
    dimension_numbers: DimensionNumbers | None
    stacked: Sequence[str]


_VECTORS = (Role.BIAS, Role.GAIN)
_VECTOR = MuonDimensionNumbers((), -1)
_SCALAR = MuonDimensionNumbers((), ())
# Flax Linen's and NNX's names, Haiku's, and Equinox's and PyTorch's `weight`, which is (out, in).
_LEAF_ROLES = {
    "bias": Role.BIAS,
    "b": Role.BIAS,
    "offset": Role.BIAS,
    "beta": Role.BIAS,
    "scale": Role.GAIN,
    "gain": Role.GAIN,
    "gamma": Role.GAIN,
    "embedding": Role.EMBEDDING,
    "embeddings": Role.EMBEDDING,
}
_KERNELS = ("kernel", "w", "weight")
_NORM = re.compile(r".*norm(_\w+|\d+)?|ln(_\w+|\d+)?", re.IGNORECASE)
_READOUT = re.compile(r"((lm|output|classification|cls)_?)?head|readout|unembed(ding)?|logits", re.IGNORECASE)
_EMBEDDING = re.compile(
    r"(?!patch)(.*_)?(wte|wpe|emb|embed(ding|dings|der)?)(_(tokens|positions))?", re.IGNORECASE
)


class Decision(NamedTuple):
    """What was decided about one parameter."""

    path: str
    shape: tuple[int, ...]
    role: Role
    fan_in: int
    """Of one matrix; 1 for embeddings, whose inputs are one-hot, and for biases and gains."""
    fan_out: int
    dimension_numbers: MuonDimensionNumbers
    """Input and output axes; a bias or gain has no input axes. All other axes are batch axes."""


def decide(
    params: Any,
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> dict[str, Decision]:
    """The role and fans of every parameter.

    What is not declared follows from the last part of the path, or from the one before it:

    - `kernel` and `w` are matrices (in, out); `weight` is a matrix (out, in), or with one axis a gain;
      readouts where the layer is called `lm_head`, `head`, `readout`, `unembed` or the like;
    - `embedding`, `embeddings`, and a `weight` of a layer called `wte`, `*embed` or the like, are embeddings
      (vocabulary, features);
    - `bias`, `b`, `offset` and `beta` are biases, `scale`, `gain`, `gamma` and a norm's `weight` are gains;
      in layers called `norm`, `ln` or the like, and for `scale`, all axes but the last are stack axes.

    Everything else must be declared: other names, kernels with more than two axes, biases with more than one.

    Args:
      params: a pytree of (abstract) arrays, of any framework.
      roles: glob patterns on paths -> role, such as `{"wte/*": Role.EMBEDDING}`.
      dimension_numbers: for all matrices and readouts, or by pattern (there for biases too, with no input
        axes); other axes are batch axes. Axes that grow with the width, such as attention heads, belong to
        the inputs or outputs.
      stacked: glob patterns on the paths of parameters whose first axis is a stack of layers.

    Returns:
      path -> decision, in the tree's order.

    Raises:
      ValueError: a pattern fits no parameter, or a parameter cannot be decided or does not fit what is
        declared; every such one is named, with what to write.
      TypeError: roles are no `Role`s, or dimension numbers no `MuonDimensionNumbers`.
    """
    _require_types(roles, dimension_numbers)
    if roles is not None:
        match(params, roles, "pattern of roles")
    if isinstance(dimension_numbers, Mapping):
        match(params, dimension_numbers, "pattern of dimension_numbers")
    match(params, dict.fromkeys(_patterns(stacked)), "pattern of stacked")
    return decide_part(params, roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)


def decide_part(
    params: Any,
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> dict[str, Decision]:
    """`decide` for a part of the parameters, of which the patterns may name others."""
    _require_types(roles, dimension_numbers)
    leaves = dict(named_leaves(params))
    declared = first_matches(leaves, roles or {})
    dimensions: dict[str, MuonDimensionNumbers] = {}
    of_matrices: MuonDimensionNumbers | None = None
    if isinstance(dimension_numbers, Mapping):
        dimensions = first_matches(leaves, dimension_numbers)
    else:
        of_matrices = dimension_numbers
    stacks = first_matches(leaves, dict.fromkeys(_patterns(stacked), 1))

    def decision(path: str) -> Decision:
        _require_floating(path, leaves[path])
        stack, shape = stacks.get(path, 0), jnp.shape(leaves[path])
        role = declared.get(path) or _role_by_name(path, shape, stack)
        given = dimensions.get(path)
        if given is None and role in (Role.MATRIX, Role.READOUT):
            given = of_matrices
        return _decision(path, shape, role, given or _axes_by_name(path, shape, role, stack))

    return _all_or_errors(decision, leaves)


def _all_or_errors(decision: Callable[[str], Decision], paths: Any) -> dict[str, Decision]:
    decided, errors = {}, []
    for path in paths:
        try:
            decided[path] = decision(path)
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError("\n".join(errors))
    return decided


def _role_by_name(path: str, shape: tuple[int, ...], stack: int) -> Role:
    layer, leaf = ["", *path.split("/")][-2:]
    if leaf in _LEAF_ROLES:
        return _LEAF_ROLES[leaf]
    if leaf == "weight":
        if _NORM.fullmatch(layer) or len(shape) - stack == 1:
            return Role.GAIN
        if _EMBEDDING.fullmatch(layer) and not _READOUT.fullmatch(layer):
            return Role.EMBEDDING
    if leaf in _KERNELS:
        return Role.READOUT if _READOUT.fullmatch(layer) else Role.MATRIX
    if _EMBEDDING.fullmatch(leaf) and not _READOUT.fullmatch(leaf):
        return Role.EMBEDDING
    raise ValueError(
        f"cannot tell what {path} with shape {shape} is: write roles={{{path!r}: Role.MATRIX}}, or another "
        "Role"
    )


def _axes_by_name(path: str, shape: tuple[int, ...], role: Role, stack: int) -> MuonDimensionNumbers:
    layer, leaf = ["", *path.split("/")][-2:]
    own = len(shape) - stack
    if role in _VECTORS:
        # A norm's parameters act on each feature by itself, so that axes before the last can only be a stack.
        if own == 1 or own > 1 and (leaf == "scale" or _NORM.fullmatch(layer)):
            return _VECTOR
        if own == 0 and not stack:
            return _SCALAR
    elif own == 2:
        transposed = leaf == "weight" and role is not Role.EMBEDDING
        return MuonDimensionNumbers(-1, -2) if transposed else KERNEL
    axis = "()" if role in _VECTORS else "-2"
    advice = f"write dimension_numbers={{{path!r}: MuonDimensionNumbers({axis}, -1)}} with its own axes"
    if not stack and own > 1:
        advice += f", or stacked=[{path!r}] if its first axis is a stack of layers"
    elif stack:
        advice += ", or leave it out of `stacked`"
    raise ValueError(
        f"cannot tell which axes of {path} with shape {shape} and role {role.value} are inputs and outputs: "
        f"{advice}"
    )


def _decision(
    path: str, shape: tuple[int, ...], role: Role, dimension_numbers: MuonDimensionNumbers
) -> Decision:
    if role in _VECTORS:
        outputs = _vector_axes(path, shape, role, dimension_numbers)
        return Decision(path, shape, role, 1, math.prod(shape[i] for i in outputs), dimension_numbers)
    try:
        _, inputs, outputs = axes(shape, dimension_numbers)
    except ValueError as error:
        raise ValueError(f"{path} with role {role.value}: {error}") from error
    fan_in = 1 if role is Role.EMBEDDING else math.prod(shape[i] for i in inputs)
    return Decision(path, shape, role, fan_in, math.prod(shape[i] for i in outputs), dimension_numbers)


def _vector_axes(
    path: str, shape: tuple[int, ...], role: Role, dimension_numbers: MuonDimensionNumbers
) -> tuple[int, ...]:
    inputs, outputs = dimension_numbers
    if inputs != ():
        raise ValueError(
            f"{path} with shape {shape} is a {role.value}, which has no input axes, but {dimension_numbers} "
            "names some: write MuonDimensionNumbers((), -1), or narrow the pattern of dimension_numbers"
        )
    outputs = (outputs,) if isinstance(outputs, int) else tuple(outputs)
    if any(not -len(shape) <= axis < len(shape) for axis in outputs):
        raise ValueError(f"{path} with role {role.value}: {dimension_numbers} does not fit shape {shape}")
    return tuple(axis % len(shape) for axis in outputs)


def role_axes(decision: Decision) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(batch, input, output) axes of a parameter, each as non-negative numbers."""
    if decision.role not in _VECTORS:
        return axes(decision.shape, decision.dimension_numbers)
    outputs = _vector_axes(decision.path, decision.shape, decision.role, decision.dimension_numbers)
    return tuple(i for i in range(len(decision.shape)) if i not in outputs), (), outputs


def format_decisions(
    decisions: Mapping[str, Decision], multipliers: Mapping[str, float] | None = None
) -> str:
    """A table of what was decided, to be printed.

    Args:
      decisions: from `decide`.
      multipliers: path -> factor on the learning rate, from `learning_rate_multipliers`.

    Returns:
      Lines of path, shape, role, fan_in, fan_out, sigma (of `spectral_normal`'s entries; gains start at 1,
      biases at 0) and multiplier.
    """
    rows = [("path", "shape", "role", "fan_in", "fan_out", "sigma", "multiplier")]
    for path, decision in decisions.items():
        _, shape, role, fan_in, fan_out, _ = decision
        sigma = gaussian_sigma(role, fan_in, fan_out)
        multiplier = "-" if multipliers is None else f"{multipliers[path]:.4g}"
        shape_text = "x".join(map(str, shape)) or "scalar"
        rows.append((path, shape_text, role.value, str(fan_in), str(fan_out), f"{sigma:.4g}", multiplier))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [x.rjust(w) if i > 2 else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def _patterns(stacked: Sequence[str]) -> tuple[str, ...]:
    return (stacked,) if isinstance(stacked, str) else tuple(stacked)


def _require_floating(path: str, leaf: Any) -> None:
    dtype = jax.dtypes.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{path} with shape {jnp.shape(leaf)} has {dtype} entries, which no rule is for: leave it out "
            "of the params (a filter for trainable parameters, optax.masked or optax.partition)"
        )


def _require_types(roles: Roles | None, dimension_numbers: DimensionNumbers | None) -> None:
    if roles is not None and not (
        isinstance(roles, Mapping) and all(isinstance(role, Role) for role in roles.values())
    ):
        raise TypeError(f"roles must map patterns to Roles, like {{'wte/*': Role.EMBEDDING}}; got {roles!r}")
    values = dimension_numbers.values() if isinstance(dimension_numbers, Mapping) else [dimension_numbers]
    if dimension_numbers is not None and not all(isinstance(x, MuonDimensionNumbers) for x in values):
        raise TypeError(
            "dimension_numbers must be an optax.contrib.MuonDimensionNumbers, or map patterns to them; "
            f"got {dimension_numbers!r}"
        )
