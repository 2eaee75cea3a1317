"""The transforms inside optax's wrappers and JAX's transformations: always the same weights as alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import (
    DualAscent,
    Stiefel,
    constraint_violations,
    manifold_muon,
    muon_states,
    named_assignment,
    project_params,
    retract,
    scale_by_manifold_muon,
)
from spectral import KERNEL

HETERO = named_assignment("hetero")
# Equality of weights is the question here, not the steps' quality: few polynomials compile fast.
SOLVER = DualAscent(iterations=2, msign_steps=3)
STEPS = 3
SHAPES = {"attn": {"kernel": (2, 4, 6)}, "mlp": {"kernel": (2, 6, 4)}, "ln": {"scale": (4,)}}


def random_tree(seed: int, *leading: int) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=leading + shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


PARAMS = project_params(random_tree(0), HETERO)
GRADIENTS = [random_tree(seed) for seed in range(1, STEPS + 1)]


def optimizer(learning_rate=0.02, adam_learning_rate=3e-3, **kwargs) -> optax.GradientTransformation:
    return manifold_muon(
        learning_rate, HETERO, adam_learning_rate=adam_learning_rate, solver=SOLVER, **kwargs
    )


def matrices_only(learning_rate: float = 0.02) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_manifold_muon(HETERO, solver=SOLVER),
        optax.scale_by_learning_rate(learning_rate),
        retract(HETERO),
    )


def train(transform: optax.GradientTransformation, params=PARAMS, gradients=GRADIENTS):
    """(params, state) after all gradients."""
    update = jax.jit(transform.update)
    state = transform.init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# Compiled once: jax.jit knows the update function again.
OPTIMIZER = optimizer()


@pytest.fixture(scope="module")
def alone() -> dict:
    return train(OPTIMIZER)[0]


def assert_close(found, expected, atol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


# ---------------------------------------------------------------------------- optax


def test_the_rest_is_adamw(alone):
    others = optax.adamw(3e-3, 0.9, 0.95, 1e-8, weight_decay=0.1)
    found, _ = train(optimizer(adam_weight_decay=0.1))
    expected, _ = train(others, PARAMS["ln"], [gradient["ln"] for gradient in GRADIENTS])
    assert_close(found["ln"], expected, atol=1e-7)
    masked, _ = train(
        optimizer(
            adam_weight_decay=0.1, adam_weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        )
    )
    assert_close(masked["ln"], alone["ln"], atol=1e-7)
    assert np.abs(found["ln"]["scale"] - alone["ln"]["scale"]).max() > 1e-5


def test_weight_decay_spares_the_manifolds(alone):
    assert_close(train(optimizer(weight_decay=0.5))[0], alone, atol=1e-7)


def test_partition_by_hand(alone):
    parts = {"matrices": matrices_only(), "rest": optax.adamw(3e-3, 0.9, 0.95, weight_decay=0.0)}
    labels = {"attn": "matrices", "mlp": "matrices", "ln": "rest"}
    assert_close(train(optax.partition(parts, labels))[0], alone)


def test_partition_by_hand_with_dimension_numbers_for_all(alone):
    """As in manifold_muon, they may name parameters that another optimiser has."""
    dims = {"*kernel": KERNEL, "ln/*": KERNEL}
    matrices = optax.chain(
        scale_by_manifold_muon(HETERO, dims, solver=SOLVER), optax.scale(-0.02), retract(HETERO, dims)
    )
    parts = {"matrices": matrices, "rest": optax.adamw(3e-3, 0.9, 0.95, weight_decay=0.0)}
    labels = {"attn": "matrices", "mlp": "matrices", "ln": "rest"}
    assert_close(train(optax.partition(parts, labels))[0], alone)


@pytest.mark.parametrize("kind", ["whole", "alone"])
def test_map_params(kind):
    """optax finds what in a state is shaped like params (to shard it, say) by the init of a placeholder."""
    transform = OPTIMIZER
    params = PARAMS
    if kind == "alone":
        transform = optax.chain(scale_by_manifold_muon(HETERO, solver=SOLVER), retract(HETERO))
        params = {key: PARAMS[key] for key in ("attn", "mlp")}
    state = transform.init(params)
    marked = optax.tree.map_params(transform, lambda x: x + 1, state, transform_non_params=lambda x: x - 1)
    for before, after in zip(*map(jax.tree.leaves, (state, marked)), strict=True):
        np.testing.assert_array_equal(after, before + 1 if before.ndim else before - 1)


def test_masked(alone):
    mask = {"attn": {"kernel": True}, "mlp": {"kernel": True}, "ln": {"scale": False}}
    found, _ = train(optax.masked(matrices_only(), mask))
    assert_close({**found, "ln": alone["ln"]}, alone)
    expected = PARAMS["ln"]["scale"] + sum(gradient["ln"]["scale"] for gradient in GRADIENTS)
    np.testing.assert_allclose(found["ln"]["scale"], expected, atol=1e-6)


def test_chain_with_clipping(alone):
    clip = optax.clip_by_global_norm(1.0)
    clipped = [clip.update(gradient, clip.init(PARAMS))[0] for gradient in GRADIENTS]
    found, _ = train(optax.chain(clip, OPTIMIZER))
    assert_close(found, train(OPTIMIZER, PARAMS, clipped)[0])
    assert np.abs(found["attn"]["kernel"] - alone["attn"]["kernel"]).max() > 1e-4


def test_multi_steps(alone):
    """Two halves of each gradient in turn: weights wait for the second, then move by the mean."""
    halves = []
    for gradient, other in zip(GRADIENTS, GRADIENTS[::-1], strict=True):
        halves += [jax.tree.map(jnp.add, gradient, other), jax.tree.map(jnp.subtract, gradient, other)]
    transform = optax.MultiSteps(OPTIMIZER, every_k_schedule=2)
    waiting, _ = train(transform, PARAMS, halves[:1])
    assert_close(waiting, PARAMS, atol=0)
    assert_close(train(transform, PARAMS, halves)[0], alone)


def test_inject_hyperparams(alone):
    injected = optax.inject_hyperparams(manifold_muon, static_args="solver")(
        0.02, HETERO, adam_learning_rate=3e-3, solver=SOLVER
    )
    found, state = train(injected)
    assert_close(found, alone)
    assert {"learning_rate", "momentum", "weight_decay", "adam_learning_rate"} <= set(state.hyperparams)
    state = injected.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = jax.jit(injected.update)(GRADIENTS[0], state, PARAMS)
    np.testing.assert_allclose(updates["attn"]["kernel"], 0.0, atol=1e-5)


def test_schedules():
    rates = jnp.array([0.0, 0.03, 0.01])
    schedule = lambda step: rates[step]  # noqa: E731
    scheduled = optimizer(schedule, schedule)
    found, _ = train(scheduled)
    injected = optax.inject_hyperparams(manifold_muon, static_args="solver")(
        schedule, HETERO, adam_learning_rate=schedule, solver=SOLVER
    )
    assert_close(found, train(injected)[0])
    first, _ = train(scheduled, PARAMS, GRADIENTS[:1])
    assert_close(first, PARAMS)  # a rate of 0 leaves weights on their manifold alone
    assert np.abs(found["mlp"]["kernel"] - PARAMS["mlp"]["kernel"]).max() > 1e-3


def test_apply_if_finite(alone):
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), GRADIENTS[0])
    gradients = [GRADIENTS[0], bad, *GRADIENTS[1:], bad]
    found, state = train(optax.apply_if_finite(OPTIMIZER, max_consecutive_errors=3), PARAMS, gradients)
    assert_close(found, alone)
    assert int(state.total_notfinite) == 2


def test_retract_after_adam():
    """Any optimiser may stand before it."""
    patterns = {"*kernel": Stiefel()}
    params = project_params(random_tree(4), patterns)
    found, _ = train(optax.chain(optax.adam(1e-2), retract(patterns)), params)
    assert max(v.max() for v in constraint_violations(found, patterns).values()) < 1e-5
    plain, _ = train(optax.adam(1e-2), params)
    assert_close(found["ln"], plain["ln"], atol=1e-7)
    assert max(v.max() for v in constraint_violations(plain, patterns).values()) > 1e-4
    assert np.abs(found["attn"]["kernel"] - params["attn"]["kernel"]).max() > 5e-3


def test_momentum_dtype(alone):
    found, state = train(optimizer(mu_dtype=jnp.bfloat16))
    momenta = [muon.mu for muon in muon_states(state)]
    assert len(momenta) == 1
    assert {leaf.dtype for leaf in jax.tree.leaves(momenta)} == {jnp.dtype(jnp.bfloat16)}
    assert_close(found, alone, atol=5e-3)
    assert max(v.max() for v in constraint_violations(found, HETERO).values()) < 1e-5


def test_momentum_is_the_papers():
    """b = 0.95 b + g, without the factor 1 - 0.95."""
    kernels = {key: PARAMS[key] for key in ("attn", "mlp")}
    gradients = [{key: gradient[key] for key in kernels} for gradient in GRADIENTS]
    _, state = train(scale_by_manifold_muon(HETERO, solver=SOLVER), kernels, gradients)
    expected = jax.tree.map(lambda a, b, c: 0.95**2 * a + 0.95 * b + c, *gradients)
    assert_close(state.mu, expected)


# ---------------------------------------------------------------------------- JAX


def test_without_jit(alone):
    updates, _ = OPTIMIZER.update(GRADIENTS[0], OPTIMIZER.init(PARAMS), PARAMS)
    assert_close(optax.apply_updates(PARAMS, updates), train(OPTIMIZER, PARAMS, GRADIENTS[:1])[0])


def test_scan(alone):
    transform = OPTIMIZER
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *GRADIENTS)

    @jax.jit
    def run(params):
        def step(carry, gradient):
            updates, state = transform.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, transform.init(params)), stacked)[0][0]

    assert_close(run(PARAMS), alone)


def test_vmap_over_a_population():
    transform = OPTIMIZER
    population = [project_params(random_tree(10 + i), HETERO) for i in range(3)]
    gradients = [[random_tree(20 + 3 * i + j) for j in range(2)] for i in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *population)
    state = jax.vmap(transform.init)(stacked)
    update = jax.jit(jax.vmap(transform.update))
    for step in range(2):
        gradient = jax.tree.map(lambda *x: jnp.stack(x), *(g[step] for g in gradients))
        updates, state = update(gradient, state, stacked)
        stacked = optax.apply_updates(stacked, updates)
    for i in range(3):
        expected, _ = train(transform, population[i], gradients[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], stacked), expected)


def test_derivative_by_the_learning_rate():
    """Steps can be differentiated through: the solver, the matrix signs and the retraction."""

    @jax.jit
    def loss(learning_rate):
        transform = optimizer(learning_rate)
        updates, _ = transform.update(GRADIENTS[0], transform.init(PARAMS), PARAMS)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(optax.apply_updates(PARAMS, updates)))

    expected = (loss(0.03) - loss(0.01)) / 0.02
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.02), expected, rtol=1e-2)
