"""What the optimisers are measured on: a model's parameters, and gradients of its loss on real text."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from experiments.config import Model, preset
from experiments.corpus import STDLIB, load, train_batches
from experiments.model import GPT2, init_params
from experiments.train import mean_loss


@dataclass(frozen=True)
class Workload:
    """A model, and how long optimisers are measured on it.

    The text is the standard library's source as bytes, whatever the vocabulary: the other tokens' embeddings
    get no gradient but through the softmax, and their AdamW update costs what it always costs.
    """

    name: str
    model: Model
    batch_size: int
    """Sequences in a gradient."""
    length: int
    """Tokens in a sequence; at most the model's context."""
    warm_steps: int
    """Steps before those that are timed, so that momenta and warm starts are real."""
    timed_steps: int
    seconds: float
    """An optimiser whose timed steps have taken this long is timed no more."""
    judged_layers: tuple[int, ...]
    """Whose directions are compared with the optimum."""

    def initial_params(self) -> dict[str, Any]:
        """GPT-2's initial parameters."""
        return init_params(self.model, jax.random.key(0))

    def batches(self) -> Iterator[np.ndarray]:
        """Endless batches of tokens, the same at every call."""
        corpus = load(STDLIB, vocab_size=self.model.vocab_size, context=self.length)
        return train_batches(
            corpus, batch_size=self.batch_size, context=self.length, seed=0, start_step=0, stop_step=1 << 30
        )

    @cached_property
    def gradient(self) -> Any:
        """The jitted function (params, tokens) -> gradient of the mean loss."""
        return jax.jit(jax.grad(partial(mean_loss, GPT2(self.model))))


TINY = Workload(
    "tiny",
    preset("tiny").model,
    16,
    128,
    warm_steps=20,
    timed_steps=20,
    seconds=60,
    judged_layers=(0, 1, 2, 3),
)
GPT2_SMALL = Workload(
    "gpt2-small",
    # In float32, the fast way on a CPU, and without rematerialisation: neither changes what is timed.
    replace(preset("gpt2-small").model, compute_dtype="float32", remat=False),
    batch_size=2,
    length=256,
    warm_steps=1,
    timed_steps=3,
    seconds=60,
    judged_layers=(6,),
)


def of_width(width: int) -> Workload:
    """Two layers of this width with GPT-2's proportions and 64 features a head, on bytes."""
    model = Model(vocab_size=256, context=128, layers=2, heads=max(width // 64, 1), width=width)
    return Workload(
        f"width-{width}", model, 4, 128, warm_steps=3, timed_steps=5, seconds=30, judged_layers=()
    )
