"""Whole optimisers whose learning rate and weight decay, tuned at a base model, hold at every width.

All have the order direction, rule, decay, rate:

    w <- w - rate * (multiplier * direction + weight_decay * w)

so that the weights shrink by rate * weight_decay in a step whatever their multiplier. `optax.adamw` followed
by the multipliers would shrink a matrix less the wider the model: decay is not an update that a layer's
input adds up over its width, but the same factor on every weight, and its time scale 1 / (rate *
weight_decay) belongs to the training run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import optax
from jax.typing import DTypeLike

from spectral.dimensions import DimensionNumbers
from spectral.paths import map_named
from spectral.roles import Hints, Roles, decide_part
from spectral.rules import Role
from spectral.transforms import Base, scale_by_spectral_rule, scale_gradients_to_base

Mask = Any | Callable[[optax.Params], Any] | None


def spectral_adamw(
    learning_rate: optax.ScalarOrSchedule,
    base: Base,
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    mu_dtype: DTypeLike | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """AdamW whose rate and decay are those of a base model, at any width.

    Args:
      learning_rate: tuned at the base; a number or a schedule.
      base, roles, dimension_numbers, stacked: see `scale_by_spectral_rule`.
      b1, b2, eps, eps_root, mu_dtype, nesterov: as in `optax.adamw`. Epsilon acts on gradients brought back
        to their size at the base (see `scale_gradients_to_base`).
      weight_decay: decoupled, times the rate and not the multiplier (why: see this module).
      mask: what the decay is applied to, a tree of bools or a function of params, as in `optax.adamw`.

    Returns:
      An optax gradient transformation; at the base itself it is `optax.adamw`. `optax.inject_hyperparams`
      takes any callable for a schedule: name those that are none (a base or a mask) in its `static_args`.

    Raises:
      ValueError: at init, when a parameter cannot be decided or the base does not fit (see
        `scale_by_spectral_rule`).

    Source: arXiv:2310.17813, Parametrization 1; Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", arXiv:1711.05101.
    """
    hints = Hints(roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)
    return optax.chain(
        scale_gradients_to_base(base, **hints),
        optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        scale_by_spectral_rule(base, "adam", **hints),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def spectral_sgd(
    learning_rate: optax.ScalarOrSchedule,
    base: Base,
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Mask = None,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """SGD whose rate and decoupled decay are those of a base model, at any width.

    Args:
      learning_rate, base, roles, dimension_numbers, stacked, weight_decay, mask: as in `spectral_adamw`.
      momentum, nesterov, accumulator_dtype: as in `optax.sgd`.

    Returns:
      An optax gradient transformation.

    Raises:
      ValueError: as in `spectral_adamw`.

    Source: arXiv:2310.17813, Parametrization 1.
    """
    hints = Hints(roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)
    trace = optax.identity() if momentum is None else optax.trace(momentum, nesterov, accumulator_dtype)
    return optax.chain(
        trace,
        scale_by_spectral_rule(base, "sgd", **hints),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def spectral_muon(
    learning_rate: optax.ScalarOrSchedule,
    base: Base,
    *,
    adam_learning_rate: optax.ScalarOrSchedule,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
    direction: optax.GradientTransformation | None = None,
    weight_decay: float = 0.0,
    mask: Mask = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Muon for the matrices and AdamW for the rest, the readout too, with a base model's rates at any width.

    Args:
      learning_rate, adam_learning_rate: tuned at the base; numbers or schedules.
      base, roles, dimension_numbers, stacked: see `scale_by_spectral_rule`. A readout declared as a
        `Role.MATRIX` gets Muon's update.
      direction: what gives the matrices orthogonal updates of norm 1; None is `optax.contrib.scale_by_muon`
        at its defaults, and `scale_by_manifold_muon({"*": Unconstrained()})` another. Not
        `optax.contrib.muon`, which has a rule for shapes of its own.
      weight_decay, adam_weight_decay: decoupled, of the matrices and of the rest.
      mask: what both decays are applied to, as in `spectral_adamw`.
      adam_b1, adam_b2, adam_eps: as in `spectral_adamw`.

    Returns:
      An optax gradient transformation.

    Raises:
      ValueError: as in `spectral_adamw`.

    Source: arXiv:2310.17813, Condition 1, with updates of norm 1.
    """
    hints = Hints(roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)

    def specification(params: optax.Params) -> Any:
        decided = decide_part(params, **hints)
        return map_named(lambda path, _: decided[path].dimension_numbers, params)

    muon = optax.chain(
        direction or optax.contrib.scale_by_muon(weight_dimension_numbers=specification),
        scale_by_spectral_rule(base, "muon", **hints),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = spectral_adamw(
        adam_learning_rate,
        base,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        weight_decay=adam_weight_decay,
        mask=mask,
        **hints,
    )
    return optax.partition({"muon": muon, "adamw": adamw}, muon_labels(**hints))


def muon_labels(
    *,
    roles: Roles | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    stacked: Sequence[str] = (),
) -> Callable[[optax.Params], Any]:
    """Labels for `optax.partition`: "muon" for every matrix, "adamw" for the rest and readouts.

    Args:
      roles, dimension_numbers, stacked: see `decide`.

    Returns:
      A function of params, which gives a tree like them.
    """

    def labels(params: optax.Params) -> Any:
        decided = decide_part(params, roles=roles, dimension_numbers=dimension_numbers, stacked=stacked)
        return map_named(
            lambda path, _: "muon" if decided[path].role is Role.MATRIX else "adamw",
            params,
        )

    return labels
