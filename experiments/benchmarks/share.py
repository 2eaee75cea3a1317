"""The optimiser's share of a training step's operations, on an accelerator, and where its products go."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from experiments.benchmarks.costs import ACCELERATOR, step_flops
from experiments.benchmarks.flops import Flops, count_flops
from experiments.benchmarks.optimizers import Contender
from experiments.benchmarks.trips import Measured
from experiments.config import Run
from experiments.model import GPT2, init_params
from experiments.train import mean_loss

PARTS = {
    "gram": "Gram matrices of G and W",
    "inverse_root": "inverse roots",
    "evaluate": "the rest of the evaluations at a dual variable",
    "step": "inner solves",
    "anderson": "Anderson acceleration",
    "direction": "the direction in full space",
    "msign": "matrix signs",
    "polar_retraction": "retraction",
}
"""Named scopes and jitted functions of `manifold_muon` -> what they compute."""


@dataclass(frozen=True)
class Share:
    """Operations of one training step."""

    model: Flops
    """Forward and backward, without rematerialisation."""
    optimizer: Flops

    @property
    def products(self) -> float:
        """The optimiser's products over the model's."""
        return self.optimizer.products / self.model.products

    @property
    def bfloat16_passes(self) -> float:
        """The same, weighted by the precision of the products (see `flops.BFLOAT16_PASSES`)."""
        return self.optimizer.bfloat16_passes / self.model.bfloat16_passes

    def parts(self) -> dict[str, float]:
        """Part -> its share of the optimiser's products."""
        by_scope = self.optimizer.products_by_scope(PARTS)
        named = {PARTS.get(name, name): count for name, count in by_scope.items()}
        return {
            name: count / self.optimizer.products
            for name, count in sorted(named.items(), key=lambda item: -item[1])
        }


def model_flops(config: Run) -> Flops:
    """Forward and backward of a batch, without rematerialisation.

    Attention counts as all its T x T products: a causal mask saves none of them where they are computed.
    """
    model = replace(config.model, remat=False)
    params = jax.eval_shape(partial(init_params, model), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.data.batch_size, model.context + 1), jnp.int32)
    return count_flops(
        jax.value_and_grad(partial(mean_loss, GPT2(model))), params, tokens, platform=ACCELERATOR
    )


def share(config: Run, contender: Contender, measured: Measured, iterations: float | None = None) -> Share:
    """The optimiser's share under a run's configuration.

    Args:
      config: whose model and batch size.
      contender: the optimiser.
      measured: on an accelerator's path, see `costs.measured_step`.
      iterations: of the solver; None takes the measured, of the slowest matrix in each stack.
    """
    params = jax.eval_shape(partial(init_params, config.model), jax.random.key(0))
    return Share(model_flops(config), step_flops(contender, params, ACCELERATOR, measured, iterations))
