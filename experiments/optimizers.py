"""A run's optimizer, from its configuration: section names follow the paper's set-up."""

from dataclasses import replace
from typing import Any

import jax
import optax
from jaxtyping import Array

from experiments.config import ADAMW, MATRICES, SGD, Optimizer, Run
from experiments.errors import InputError
from experiments.model import init_params, initial_std
from manifold_muon import (
    DGram,
    DualAscent,
    GramSolver,
    Manifold,
    Solver,
    Unconstrained,
    manifold_muon,
    muon_states,
    named_assignment,
    project_params,
    scale_by_manifold_muon,
)
from manifold_muon import constraint_violations as violations_by_path
from sel_jax import SCALES, annealed, beta_for, decay_mask, reparametrize, scale_rates
from spectral import spectral_adamw, spectral_muon, spectral_sgd
from spectral.paths import map_named, named_leaves

_STACK = "h/"
STACKED = (f"{_STACK}*",)
"""Glob patterns on the paths of the parameters whose first axis is the blocks' layers."""


def learning_rate_schedule(config: Run, peak: float | None = None) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `final_fraction` of it at the last step.

    Args:
      config: of the run.
      peak: rate after warm-up; None is AdamW's.
    """
    peak = config.optimizer.learning_rate if peak is None else peak
    warmup = config.optimizer.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        # The first step moves too: rate peak / (warmup + 1), not 0.
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=peak * config.optimizer.final_fraction,
    )


def manifolds(config: Run) -> dict[str, Manifold]:
    """Glob pattern -> manifold of the run's block matrices; AdamW's and SGD's are unconstrained.

    Raises:
      InputError: the optimizer's name is neither `adamw` nor `sgd` nor an assignment.
    """
    name = config.optimizer.name
    try:
        named = named_assignment("none" if name in (ADAMW, SGD) else name)
    except ValueError as error:
        raise InputError(f"optimizer.name: {error} (or {ADAMW}, {SGD})") from error
    retraction = config.optimizer.dgram_retraction
    return {
        pattern: replace(manifold, retraction=retraction) if isinstance(manifold, DGram) else manifold
        for pattern, manifold in named.items()
    }


def prepare_params(params: Any, config: Run) -> Any:
    """The initial parameters, with the block matrices put on their manifolds, or into curved weight space."""
    params, sel = project_params(params, manifolds(config)), config.sel
    if not sel.on:
        return params
    for name in MATRICES:
        params = reparametrize(
            params,
            f"{_STACK}{name}/kernel",
            beta=beta_for(initial_std(config.model, name), sel.curvature),
            start="mismatched" if sel.start == "mismatched" else "exact",
            learn=[scale for scale in SCALES if sel.learnable and (sel.linear or scale != "l")],
            values={} if sel.linear else {"l": 0.0},
        )
    return params


def constraint_violations(params: Any, config: Run) -> dict[str, Array]:
    """`attn/c_attn` and so on -> distance of ordinary params from the manifold, one number a layer."""
    found = violations_by_path(params, manifolds(config))
    return {_matrix(name): value for name, value in found.items()}


def make_optimizer(config: Run, axis_name: str | None = None) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, SGD, or Manifold Muon with AdamW for all but the block matrices.

    In the spectral parametrisation rates are those of the base width. The gradient that is clipped has the
    same norm at every width there, but for an untied head's, which grows as the width's square root; only SGD
    depends on it. With SEL, the scales' own rates come last. Where the configuration allows for some, a
    gradient that is not finite changes nothing, not even the optimizer's state.

    Args:
      config: of the run.
      axis_name: the mapped axis over whose devices the tangent step's solutions are shared; None reads a mesh
        from the parameters.
    """
    sel = config.sel
    make = _spectral if config.model.spectral else _standard
    rest = make(config, axis_name)
    chain = [optax.clip_by_global_norm(config.optimizer.clip_norm), rest]
    if sel.on and sel.annealed:
        rates = annealed(config.steps, (sel.e_first, sel.e_last), (sel.m_first, sel.m_last))
        chain.append(scale_rates(rates))
    optimizer = optax.chain(*chain)
    skips = config.optimizer.skips
    return optax.apply_if_finite(optimizer, skips) if skips else optimizer


def _standard(config: Run, axis_name: str | None) -> optax.GradientTransformation:
    settings, rate = config.optimizer, learning_rate_schedule(config)
    betas = {"b1": settings.adam_beta1, "b2": settings.adam_beta2}
    if settings.name == ADAMW:
        return optax.adamw(rate, **betas, weight_decay=settings.weight_decay, mask=_decays)
    if settings.name == SGD:
        return optax.chain(
            optax.trace(settings.momentum, nesterov=True),
            optax.add_decayed_weights(settings.weight_decay, _decays),
            optax.scale_by_learning_rate(rate),
        )
    # Under SEL it is the raw weights that take the matrices' place.
    suffix = "/raw" if config.sel.on else ""
    return manifold_muon(
        learning_rate_schedule(config, settings.muon_learning_rate),
        {pattern + suffix: manifold for pattern, manifold in manifolds(config).items()},
        adam_learning_rate=rate,
        momentum=settings.momentum,
        solver=_solver(settings),
        axis_name=axis_name,
        weight_decay=settings.weight_decay,
        **{f"adam_{name}": value for name, value in betas.items()},
        adam_weight_decay=settings.weight_decay,
        adam_weight_decay_mask=_decays,
    )


def _spectral(config: Run, axis_name: str | None) -> optax.GradientTransformation:
    settings, rate = config.optimizer, learning_rate_schedule(config)
    betas = {"b1": settings.adam_beta1, "b2": settings.adam_beta2}

    base = jax.eval_shape(lambda: init_params(config.model.base, jax.random.key(0)))
    common = {"base": base, "stacked": STACKED, "weight_decay": settings.weight_decay, "mask": _decays}
    if settings.name == ADAMW:
        return spectral_adamw(rate, **betas, **common)
    if settings.name == SGD:
        return spectral_sgd(rate, momentum=settings.momentum, nesterov=True, **common)
    return spectral_muon(
        learning_rate_schedule(config, settings.muon_learning_rate),
        adam_learning_rate=rate,
        direction=scale_by_manifold_muon(
            {"*": Unconstrained()},
            momentum=settings.momentum,
            solver=_solver(settings),
            axis_name=axis_name,
        ),
        **{f"adam_{name}": value for name, value in betas.items()},
        adam_weight_decay=settings.weight_decay,
        **common,
    )


def _solver(settings: Optimizer) -> Solver:
    if settings.solver == "gram":
        return GramSolver(settings.tolerance)
    return DualAscent(
        settings.solver_iterations, settings.solver_step_size, settings.msign_steps, settings.msign_dtype
    )


def solver_diagnostics(opt_state: Any) -> dict[str, dict[str, Array]]:
    """`attn/c_attn` and so on -> what the solver says of its last solution, one number a layer.

    Those are `iterations` and `gap` (see `manifold_muon.Diagnostics`); AdamW has none.
    """
    found: dict[str, dict[str, Array]] = {}
    for state in muon_states(opt_state):
        for quantity, tree in state.diagnostics._asdict().items():
            for name, value in named_leaves(tree):
                found.setdefault(_matrix(name), {})[quantity] = value
    return found


def _matrix(name: str) -> str:
    return name.removeprefix(_STACK).removesuffix("/raw").removesuffix("/kernel")


def _decays(params: Any) -> Any:
    """Weight decay's mask: two or more axes, the blocks' layer axis not counted, and no scales."""
    return map_named(
        lambda name, leaf, weight: weight and leaf.ndim >= (3 if name.startswith(_STACK) else 2),
        params,
        decay_mask(params),
    )
