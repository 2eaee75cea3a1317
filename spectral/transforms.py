"""Learning rates that hold at every width, as optax gradient transformations."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import optax

from spectral.dimensions import DimensionNumbers
from spectral.paths import map_named
from spectral.roles import Decision, Hints, Roles, decide, decide_part, role_axes
from spectral.rules import OptimizerKind, Role, gradient_scale, learning_rate_scale, relative_learning_rate

Base = Any
"""The model at the width where the rate was tuned: params, or their shapes (`jax.eval_shape`), or a function
without arguments that makes them, of which only the shapes are evaluated."""

Factor = Callable[[Decision, Decision], float]


def scale_by_spectral_rule(
    base: Base,
    optimizer: OptimizerKind = "adam",
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Multiply each parameter's update by its learning rate relative to a base model.

    With the rates eta of Parametrization 1, u <- u eta(fan_in, fan_out) / eta(base fan_in, base fan_out), so
    that the rate which was tuned at the base is the one to type at every width. At the base itself nothing
    changes. It stands after the optimiser's direction and before the weight decay, which must not be
    multiplied along:

        optax.chain(
            scale_gradients_to_base(base),
            optax.scale_by_adam(),
            scale_by_spectral_rule(base, "adam"),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(3e-3),
        )

    which is `spectral_adamw(3e-3, base, weight_decay=0.1)`.

    Args:
      base: the model where the rate was tuned, which differs in its width alone: params, their shapes, or a
        function without arguments that makes them (it is only evaluated for shapes).
      optimizer: what gives the updates: `sgd` (gradients, with or without momentum), `adam` (entries of size
        1) or `muon` (orthogonal updates of norm 1, such as `optax.contrib.scale_by_muon`'s).
      roles, dimension_numbers, stacked: see `decide`. Their patterns are for the base's parameters, so that
        they may name some that `optax.partition` or `optax.masked` keeps from here.

    Returns:
      A stateless optax gradient transformation, whose `update` does not need params.

    Raises:
      ValueError: at init, when a parameter cannot be decided (see `decide`), the base is not this model at
        another width, or the optimiser is `muon` and a parameter no matrix.

    Source: arXiv:2310.17813, Parametrization 1; `learning_rate_scale` for Adam and Muon.
    """
    learning_rate_scale(Role.MATRIX, optimizer, 1, 1)  # refuses an unknown optimizer

    def factor(here: Decision, there: Decision) -> float:
        try:
            return _relative_rate(optimizer, here, there)
        except ValueError as error:
            raise ValueError(f"{here.path} with shape {here.shape}: {error}") from error

    return _scale_by(base, factor, roles, dimension_numbers, stacked)


def scale_gradients_to_base(
    base: Base,
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Bring each gradient back to its size at a base model, so that Adam's epsilon weighs what it did there.

    A gradient's entries are of size 1 / fan_out, and sink below epsilon in a wide model. Adam does not see
    the gradient's scale but for epsilon: g <- g fan_out / base fan_out before `optax.scale_by_adam` is the
    same as eps <- eps base fan_out / fan_out for this parameter, with second moments that do not underflow.

    Args:
      base, roles, dimension_numbers, stacked: as in `scale_by_spectral_rule`.

    Returns:
      A stateless optax gradient transformation, to stand right before `optax.scale_by_adam`.

    Raises:
      ValueError: at init, as in `scale_by_spectral_rule`.

    Source: Everett et al., "Scaling Exponents Across Parameterizations and Optimizers", arXiv:2407.05872
    (epsilon by layer).
    """

    def factor(here: Decision, there: Decision) -> float:
        here_scale, there_scale = (gradient_scale(x.role, x.fan_in, x.fan_out) for x in (here, there))
        return there_scale / here_scale

    return _scale_by(base, factor, roles, dimension_numbers, stacked)


def learning_rate_multipliers(
    params: Any,
    base: Base,
    optimizer: OptimizerKind = "adam",
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> dict[str, float]:
    """Each parameter's factor on a learning rate tuned at a base model, for `format_decisions`.

    Args:
      params: a pytree of (abstract) arrays.
      base, optimizer, roles, dimension_numbers, stacked: as in `scale_by_spectral_rule`; `muon` is for
        matrices, and what it is not for has Adam's.

    Returns:
      path -> factor.

    Raises:
      ValueError: as in `scale_by_spectral_rule`.
    """
    hints = Hints(roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)
    pairs = _pairs(params, decide(_shapes(base), **hints), partial(decide_part, **hints))

    def kind(decision: Decision) -> OptimizerKind:
        return "adam" if optimizer == "muon" and decision.role is not Role.MATRIX else optimizer

    return {path: _relative_rate(kind(pair[0]), *pair) for path, pair in pairs.items()}


def _relative_rate(optimizer: OptimizerKind, here: Decision, there: Decision) -> float:
    return relative_learning_rate(
        here.role, optimizer, (here.fan_in, here.fan_out), (there.fan_in, there.fan_out)
    )


def _scale_by(
    base: Base,
    factor: Factor,
    roles: Roles | None,
    dimension_numbers: DimensionNumbers | None,
    stacked: Sequence[str],
) -> optax.GradientTransformation:
    hints = Hints(roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)

    @cache
    def base_decisions() -> dict[str, Decision]:
        return decide(_shapes(base), **hints)

    def factors(tree: Any) -> dict[str, float]:
        pairs = _pairs(tree, base_decisions(), partial(decide_part, **hints))
        return {path: factor(*pair) for path, pair in pairs.items()}

    def init(params: optax.Params) -> optax.EmptyState:
        factors(params)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        # Shapes alone decide: under jit this happens while tracing.
        by_path = factors(updates)
        return map_named(lambda path, update: by_path[path] * update, updates), state

    return optax.GradientTransformation(init, update)


def _shapes(base: Base) -> Any:
    # An Equinox module can be called too, but is a tree of parameters.
    is_function = callable(base) and jax.tree_util.all_leaves([base])
    return jax.eval_shape(base) if is_function else base


def _pairs(
    tree: Any, base: dict[str, Decision], decide_here: Callable[[Any], dict[str, Decision]]
) -> dict[str, tuple[Decision, Decision]]:
    """Each parameter's decision and its counterpart's in the base, once they are known to correspond."""
    here = decide_here(tree)
    unknown = [path for path in here if path not in base]
    missing = [] if not here or _is_part(tree) else [path for path in base if path not in here]
    if unknown or missing:
        raise ValueError(
            "the base model has other parameters than this one: "
            f"only here {', '.join(unknown) or 'none'}; only in the base {', '.join(missing) or 'none'}"
        )
    pairs = {path: (decision, base[path]) for path, decision in here.items()}
    if errors := [error for pair in pairs.values() if (error := _difference(*pair))]:
        raise ValueError("\n".join(errors))
    return pairs


def _is_part(tree: Any) -> bool:
    """Whether optax.partition or optax.masked keeps other parameters from this tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(node, optax.MaskedNode) for node in nodes)


def _difference(here: Decision, there: Decision) -> str | None:
    """What is wrong with this counterpart, which may differ in its width alone."""
    what = f"{here.path} has shape {here.shape} here and {there.shape} in the base"
    if len(here.shape) != len(there.shape) or here.role is not there.role:
        return f"{what}: they need the same axes"
    batch, inputs, outputs = role_axes(here)
    changed = {i for i, (m, n) in enumerate(zip(here.shape, there.shape, strict=True)) if m != n}
    if axes := changed & set(batch):
        return (
            f"{what}, which differ in the batch axes {sorted(axes)}: build the base with the same depth, and "
            "name axes that grow with the width, such as attention heads, as inputs or outputs in "
            "dimension_numbers"
        )
    if here.role is Role.EMBEDDING and changed & set(inputs):
        return (
            f"{what}: it is an embedding, whose vocabulary does not grow with the width; "
            "transposed or no embedding? declare its dimension_numbers or its role"
        )
    if here.role is Role.READOUT and changed & set(outputs):
        return (
            f"{what}: it is a readout, whose outputs do not grow with the width; "
            f"write roles={{{here.path!r}: Role.MATRIX}} if it is none, or declare its dimension_numbers"
        )
    return None
