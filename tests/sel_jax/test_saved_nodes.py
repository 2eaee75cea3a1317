"""Reparametrised params and their optimiser's state in checkpoints: the same bits, and the same training."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.checkpoints import Checkpoints, on_default_device
from sel_jax import SelWeight, annealed, decay_mask, effective, fold, reparametrize, scale_rates

RNG = np.random.default_rng(0)
PARAMS = {
    "bias": np.zeros(3, np.float32),
    "kernel": jnp.asarray(np.float32(RNG.normal(size=(2, 4, 3))), jnp.bfloat16),
    "gain": np.ones(3, np.float32),
}
OPTIMIZER = optax.chain(optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask), scale_rates(annealed(6)))


def start(kind: str):
    """Params with nodes of this start, and their optimiser's state."""
    kernel = reparametrize(
        {"kernel": PARAMS["kernel"]}, "*", beta=4.0, start=kind, learn="emn", rank=1, key=jax.random.key(0)
    )
    nodes = {**PARAMS, **kernel, **reparametrize({"bias": PARAMS["bias"]}, "*", beta=2.0, start=kind)}
    return {"params": nodes, "opt_state": OPTIMIZER.init(nodes)}


@jax.jit
def step(state):
    def loss(params):
        return sum(jnp.sum((x.astype(jnp.float32) - 0.3) ** 2) for x in jax.tree.leaves(effective(params)))

    gradient = jax.grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradient, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_resumed_training_is_the_same(tmp_path):
    state = step(step(start("anchored")))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(on_default_device(jax.eval_shape(lambda: start("anchored"))))
    assert_same(restored, state)
    for name in ("kernel", "bias"):
        found, expected = restored["params"][name], state["params"][name]
        assert isinstance(found, SelWeight)
        for static in ("config", "dimensions", "dtype"):
            assert getattr(found, static) == getattr(expected, static)
        assert isinstance(restored["opt_state"][0][0].mu[name], SelWeight)
    assert_same(step(step(restored)), step(step(state)))
    assert_same(fold(restored["params"]), fold(state["params"]))


def test_folded_weights_are_an_ordinary_checkpoint(tmp_path):
    folded = fold(start("mismatched")["params"])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, folded)
        checkpoints._manager.wait_until_finished()
        restored = checkpoints.restore(on_default_device(jax.eval_shape(lambda: PARAMS)))
    assert_same(restored, folded)
