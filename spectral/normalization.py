"""Optax transforms that hold the spectral norm of updates, or of the weights themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from spectral.dimensions import KERNEL, DimensionNumbers, fans
from spectral.paths import map_named, named_leaves
from spectral.rules import target_norm
from spectral.selection import Where, select_matrices
from spectral.tracked_norms import first_norm, laid_out_like, track

_TOLERANCE = 3e-4
_MAX_ITERATIONS = 30

Limits = tuple[float, int]
"""Of power iteration: tolerance, most iterations."""
Rescale = Callable[[Array, float], Array]
"""(spectral norms, target) -> the norms wanted."""


class SpectralNormState(NamedTuple):
    """What is kept between steps: trees like params, optax.MaskedNode where nothing is done, and a count."""

    vectors: Any
    """Singular vectors' estimates on the side of the inputs: the parameters' axes, outputs of size 1."""
    norms: Any
    """Spectral norms of the last step, before they were changed: inputs and outputs of size 1."""
    iterations: Array
    """Matrix-vector pairs of the last step: the most that a matrix needed."""


def normalize_update(
    where: Where,
    scale: float = 1.0,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    tolerance: float = _TOLERANCE,
    max_iterations: int = _MAX_ITERATIONS,
) -> optax.GradientTransformation:
    """Rescale every matrix's update to the spectral norm scale * sqrt(fan_out / fan_in).

    The learning rate then is the norm of a step relative to Condition 1, at every width and under every
    optimiser:

        optax.chain(optax.scale_by_adam(), normalize_update("*kernel"), optax.scale_by_learning_rate(0.02))

    Leave embeddings out: one-hot inputs are judged by rows, not by a spectral norm.

    The norm is found by power iteration from the last step's vectors, until it hardly grows. Where the
    leading singular vectors persist, that is one or two matrix-vector pairs a step (4 m n FLOPs each for an
    m x n matrix, against 6 m n a token for the training step); a first step, or gradients of small batches
    that point elsewhere at every step, take more. A fixed single pair would be wrong by a factor of two
    there. The estimate is a lower bound: updates come out at the target or above it, by less than 1 % after
    a few steps of SGD or Adam. Power iteration is slow on flat spectra, such as Muon's: allow for 5 % there
    in the first tens of steps.

    Args:
      where: glob patterns on the paths of the matrices; other updates pass through.
      scale: factor on the target.
      dimension_numbers: input and output axes, for all or by pattern; other axes are batch axes, whose
        matrices are treated one by one.
      tolerance: power iteration ends when half an iteration gains no more than this, relatively. It tells
        little of the error on a flat spectrum, where gains are small from the start.
      max_iterations: most matrix-vector pairs a step.

    Returns:
      An optax gradient transformation. Zero updates stay zero. The norm is taken in float32 of narrower
      updates, which keep their dtype.

    Raises:
      ValueError, TypeError: at init, when the patterns do not fit (see `select_matrices`), or
        max_iterations < 1.

    Source: arXiv:2310.17813, Condition 1.
    """

    return _change_updates(_exactly(scale), where, dimension_numbers, tolerance, max_iterations)


def clip_by_spectral_norm(
    max_norm: float,
    where: Where,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    relative: bool = False,
    tolerance: float = _TOLERANCE,
    max_iterations: int = _MAX_ITERATIONS,
) -> optax.GradientTransformation:
    """Shrink the update of every matrix whose spectral norm is above max_norm to that norm.

    Args:
      max_norm: largest spectral norm.
      where: glob patterns on the paths of the matrices; other updates pass through.
      dimension_numbers: see `normalize_update`.
      relative: whether max_norm is in units of sqrt(fan_out / fan_in), so that one number is right for all
        shapes and widths.
      tolerance, max_iterations: see `normalize_update`, also for the norm's accuracy.

    Returns:
      An optax gradient transformation.

    Raises:
      ValueError, TypeError: see `normalize_update`.
    """

    def at_most(norms: Array, target: float) -> Array:
        return jnp.minimum(norms, max_norm * jnp.where(relative, target, 1.0))

    return _change_updates(at_most, where, dimension_numbers, tolerance, max_iterations)


def normalize_weights(
    where: Where,
    scale: float = 1.0,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    tolerance: float = _TOLERANCE,
    max_iterations: int = _MAX_ITERATIONS,
) -> optax.GradientTransformation:
    """Change updates so that every matrix ends with the spectral norm scale * sqrt(fan_out / fan_in).

    The update u of a weight W becomes W' - W, with W' the rescaled W + u: the last of a chain, after any
    optimiser, its learning rate and its weight decay.

    Args:
      where, scale, dimension_numbers, tolerance, max_iterations: see `normalize_update`. Weights move
        little in a step, so that their norm is found ever more closely; a Gaussian initialisation, whose
        spectrum is dense at its upper edge, may exceed the target by a few per cent in the first steps.

    Returns:
      An optax gradient transformation, whose `update` needs params. Its updates have the wider of the
      update's and the weight's dtype.

    Raises:
      ValueError, TypeError: see `normalize_update`.

    Source: arXiv:2310.17813, Condition 1.
    """

    return _change_weights(
        "normalize_weights", _exactly(scale), where, dimension_numbers, tolerance, max_iterations
    )


def clip_weights(
    where: Where,
    scale: float = 1.0,
    dimension_numbers: DimensionNumbers = KERNEL,
    *,
    tolerance: float = _TOLERANCE,
    max_iterations: int = _MAX_ITERATIONS,
) -> optax.GradientTransformation:
    """Change updates so that no matrix ends above the spectral norm scale * sqrt(fan_out / fan_in).

    As `normalize_weights`, but matrices below the bound are left as their update makes them.
    """

    def at_most(norms: Array, target: float) -> Array:
        return jnp.minimum(norms, scale * target)

    return _change_weights("clip_weights", at_most, where, dimension_numbers, tolerance, max_iterations)


def _exactly(scale: float) -> Rescale:
    return lambda norms, target: jnp.full_like(norms, scale * target)


def _change_updates(
    rescale: Rescale, where: Where, dimension_numbers: DimensionNumbers, *limits: *Limits
) -> optax.GradientTransformation:
    def update(
        updates: optax.Updates, state: SpectralNormState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SpectralNormState]:
        del params
        rescaled, state = _rescale(rescale, updates, state, where, dimension_numbers, *limits)

        def change(name: str, update: Array) -> Array:
            return rescaled[name].astype(update.dtype) if name in rescaled else update

        return map_named(change, updates), state

    return optax.GradientTransformation(_init(where, dimension_numbers, *limits), update)


def _change_weights(
    called: str,
    rescale: Rescale,
    where: Where,
    dimension_numbers: DimensionNumbers,
    *limits: *Limits,
) -> optax.GradientTransformation:
    def update(
        updates: optax.Updates, state: SpectralNormState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SpectralNormState]:
        if params is None:
            raise ValueError(f"{called} rescales weights and needs them: call update(grads, state, params)")
        moved = map_named(lambda _, update, weight: _wide(update) + weight, updates, params)
        rescaled, state = _rescale(rescale, moved, state, where, dimension_numbers, *limits)

        def change(name: str, update: Array, weight: Array) -> Array:
            if name not in rescaled:
                return update
            return (rescaled[name] - weight).astype(jnp.promote_types(update.dtype, weight.dtype))

        return map_named(change, updates, params), state

    return optax.GradientTransformation(_init(where, dimension_numbers, *limits), update)


def _init(
    where: Where, dimension_numbers: DimensionNumbers, tolerance: float, max_iterations: int
) -> Callable[[optax.Params], SpectralNormState]:
    # optax.inject_hyperparams makes it an array, perhaps an abstract one.
    if isinstance(max_iterations, int) and max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")

    def init(params: optax.Params) -> SpectralNormState:
        selected = select_matrices(params, where, dimension_numbers)

        def state(field: str) -> Any:
            def of_leaf(name: str, leaf: Array) -> Any:
                if name not in selected:
                    return optax.MaskedNode()
                return getattr(first_norm(leaf, selected[name]), field)

            return map_named(of_leaf, params)

        return SpectralNormState(state("vector"), state("norm"), jnp.zeros((), jnp.int32))

    return init


def _rescale(
    rescale: Rescale,
    tree: Any,
    state: SpectralNormState,
    where: Where,
    dimension_numbers: DimensionNumbers,
    tolerance: float,
    max_iterations: int,
) -> tuple[dict[str, Array], SpectralNormState]:
    """The selected leaves with the norms that `rescale` wants, in float32 or better, and the new state."""
    selected = select_matrices(tree, where, dimension_numbers)
    leaves = {name: _wide(leaf) for name, leaf in named_leaves(tree) if name in selected}
    old_vectors, treedef = jax.tree.flatten(state.vectors)
    specs = list(selected.values())
    found, iterations = track(list(leaves.values()), old_vectors, specs, tolerance, max_iterations)
    rescaled = {
        name: _with_norm(leaf, tracked.norm, rescale(tracked.norm, target_norm(*fans(leaf.shape, spec))))
        for (name, leaf), spec, tracked in zip(leaves.items(), specs, found, strict=True)
    }
    old_norms = jax.tree.leaves(state.norms)
    norms = [laid_out_like(x.norm, old) for x, old in zip(found, old_norms, strict=True)]
    vectors = jax.tree.unflatten(treedef, [x.vector for x in found])
    return rescaled, SpectralNormState(vectors, jax.tree.unflatten(treedef, norms), iterations)


def _with_norm(x: Array, norm: Array, wanted: Array) -> Array:
    # Divided first: the quotient of the norms may overflow. Untouched if it has the norm: to the last bit.
    return jnp.where(wanted == norm, x, x / jnp.where(norm == 0, 1, norm) * wanted)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
