"""SEL's costs, by the compiled program's analysis, stay within their bounds."""

from dataclasses import replace

import chex
import jax

from experiments.benchmarks.sel_costs import GPT2_SMALL, added, reparametrized_bytes, with_sel
from experiments.config import Data, Model
from experiments.model import GPT2, init_params

# Enough tokens for the shares to be near GPT-2 small's, small enough to compile in seconds.
SMALL = replace(
    GPT2_SMALL,
    model=Model(vocab_size=256, context=256, layers=12, heads=4, width=128),
    data=Data(batch_size=8),
)


def test_what_sel_adds_to_a_step() -> None:
    found = added(SMALL)
    # 2048 tokens use a weight 12288 times a step, and the map takes about a hundred operations.
    assert 0 < found.flops < 0.02
    # Sixteen times the weights: 2 for the map, 3 for their derivative, 3 for both exponentials, and 4 for the
    # sums along the rows, as for those along the columns.
    assert 0 < found.bytes < 0.10
    # The effective weights.
    assert found.temporaries <= 1.05


def test_the_bytes_of_reparametrised_weights() -> None:
    assert reparametrized_bytes(with_sel(SMALL)) == 4 * 12 * (12 * 128**2)
    assert reparametrized_bytes(SMALL) == 0


def test_unrolled_layers_are_the_same_model() -> None:
    model = replace(SMALL.model, layers=2)
    params = init_params(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)
    rolled, unrolled = (
        GPT2(model, unroll=by_one).apply({"params": params}, tokens) for by_one in (False, True)
    )
    chex.assert_trees_all_close(rolled, unrolled, atol=1e-5)
