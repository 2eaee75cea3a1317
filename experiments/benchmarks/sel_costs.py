"""What SEL adds to GPT-2's training step at width 768: by the compiled programs' analysis, and by the clock.

`make bench-sel` runs it. Operations, bytes and memory are of GPT-2 small's twelve layers at 2 x 1024 tokens.
XLA's analysis counts a loop's body once. SEL's map stands outside the loop over layers, so what it adds is
the difference of two programs with the loop; what a step costs comes from one and two layers written out.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.config import ADAMW, Data, Model, Optimizer, Run, Sel
from experiments.corpus import load
from experiments.model import GPT2
from experiments.optimizers import make_optimizer
from experiments.studies.sel.overhead import overhead
from experiments.train import TrainState, init_state, mean_loss
from sel_jax import SelWeight

LAYERS = 12
GPT2_SMALL = Run(
    model=Model(vocab_size=50304, context=1024, layers=LAYERS, heads=12, width=768),
    data=Data(batch_size=2),
    optimizer=Optimizer(name=ADAMW),
)
_TIMED_LAYERS = 2


class Costs(NamedTuple):
    """Of one step."""

    flops: float
    bytes: float
    """Read and written by all instructions."""
    temporaries: int
    """Bytes that are allocated besides arguments and results."""


class Added(NamedTuple):
    """What SEL adds, in proportion."""

    flops: float
    """To the step's."""
    bytes: float
    """To the step's."""
    temporaries: float
    """To the reparametrised weights' own bytes."""


def with_sel(config: Run) -> Run:
    """The run with SEL, its scales learnable."""
    return replace(config, sel=Sel(on=True))


def costs(config: Run, unroll: bool = False) -> Costs:
    """Costs of a training step, with the loop over layers, whose body counts once, or without."""
    optimizer = make_optimizer(config)
    loss_and_gradient = jax.value_and_grad(partial(mean_loss, GPT2(config.model, unroll=unroll)))

    def step(state: TrainState, tokens: Array) -> tuple[TrainState, Array]:
        loss, gradient = loss_and_gradient(state.params, tokens)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), loss

    state = jax.eval_shape(lambda: init_state(config, optimizer))
    tokens = jax.ShapeDtypeStruct((config.data.batch_size, config.model.context + 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    analysis = compiled.cost_analysis()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Costs(analysis["flops"], analysis["bytes accessed"], memory)


def added(config: Run) -> Added:
    """What SEL adds to a step of the configuration's model."""
    one, two = (
        costs(replace(config, model=replace(config.model, layers=layers)), unroll=True) for layers in (1, 2)
    )
    plain, curved = costs(config), costs(with_sel(config))

    def share(name: str) -> float:
        first, second, without, with_it = (getattr(found, name) for found in (one, two, plain, curved))
        return (with_it - without) / (first + (config.model.layers - 1) * (second - first))

    copies = (curved.temporaries - plain.temporaries) / reparametrized_bytes(with_sel(config))
    return Added(share("flops"), share("bytes"), copies)


def reparametrized_bytes(config: Run) -> int:
    """Bytes of the raw weights."""
    params = jax.eval_shape(lambda: init_state(config, make_optimizer(config))).params
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, SelWeight))
    return sum(node.raw.size * node.raw.dtype.itemsize for node in nodes if isinstance(node, SelWeight))


def main() -> None:
    """Prints both tables."""
    found = added(GPT2_SMALL)
    print(
        f"SEL on the block matrices of GPT-2 small, 2 x 1024 tokens a step, scales learnable:\n"
        f"operations {found.flops:+.2%}, bytes accessed {found.bytes:+.1%}, temporaries "
        f"{found.temporaries:+.2f} copies of the reparametrised weights",
        flush=True,
    )
    # Few layers and bytes as tokens, or a step would take half a minute.
    small = replace(GPT2_SMALL, model=replace(GPT2_SMALL.model, layers=_TIMED_LAYERS, vocab_size=256))
    corpus = load(small.data.corpus, vocab_size=small.model.vocab_size, context=small.model.context)
    with TemporaryDirectory() as folder:
        timed = overhead(small, with_sel(small), corpus, Path(folder) / "overhead.json")
    low, median, high = timed.ratio
    print(
        f"time of a step, {_TIMED_LAYERS} such layers, {timed.pairs} pairs on this {jax.default_backend()}: "
        f"{median - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}, quartiles); the paper: +1.7 % to +5.5 %"
    )


if __name__ == "__main__":
    main()
