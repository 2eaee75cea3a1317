"""The scales' learning rates over training: closed form, in every wrapper of optax."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sel_jax import SCALES, annealed, labels, reparametrize, scale_rates

STEPS = 8
PARAMS = {"k": np.float32(np.random.default_rng(0).normal(size=(4, 3)) / 4), "gain": np.ones(3, np.float32)}
NODES = reparametrize(PARAMS, "k", beta=4.0)
ONES = jax.tree.map(np.ones_like, NODES)


def expected(name: str, count: int, outer=(1.0, 0.1), inner=(0.1, 1.0)) -> float:
    first, last = {"e": outer, "m": inner}.get(name, (1.0, 1.0))
    return last + (first - last) * (1 + np.cos(np.pi * min(count, STEPS) / STEPS)) / 2


def run(transform, steps: int, gradients=ONES):
    """The updates of every step."""
    state, found, update = transform.init(NODES), [], jax.jit(transform.update)
    for _ in range(steps):
        updates, state = update(gradients, state, NODES)
        found.append(updates)
    return found


def assert_multiples(updates, reference, count: int, **ends):
    """Each update is the reference's times its label's multiplier."""

    def check(label, update, plain):
        np.testing.assert_allclose(update, plain * expected(label, count, **ends), rtol=1e-5, atol=1e-8)

    jax.tree.map(check, labels(reference), updates, reference)


def test_closed_form():
    assert [expected("e", 0), expected("e", STEPS // 2), expected("e", STEPS)] == [1.0, 0.55, 0.1]
    for count, updates in enumerate(run(scale_rates(annealed(STEPS)), STEPS + 3)):
        assert_multiples(updates, ONES, count)


def test_without_jit_or_params():
    transform = scale_rates(annealed(STEPS))
    updates, state = transform.update(ONES, transform.init(NODES))
    assert_multiples(updates, ONES, 0)
    assert int(state.count) == 1


def test_other_ends():
    ends = {"outer": (2.0, 0.5), "inner": (0.25, 0.75)}
    for count, updates in enumerate(run(scale_rates(annealed(STEPS, **ends)), STEPS + 1)):
        assert_multiples(updates, ONES, count, **ends)


def test_after_adam():
    adam = optax.adam(1e-2)
    scaled = run(optax.chain(adam, scale_rates(annealed(STEPS))), STEPS + 1)
    for count, (updates, plain) in enumerate(zip(scaled, run(adam, STEPS + 1), strict=True)):
        assert_multiples(updates, plain, count)


@pytest.mark.parametrize("kind", ["masked", "partition"])
def test_in_wrappers(kind):
    """Where the others' places are taken by MaskedNode."""
    rates = scale_rates(annealed(STEPS))
    if kind == "masked":
        transform = optax.masked(rates, lambda x: jax.tree.map(lambda label: label in SCALES, labels(x)))
    else:
        groups = lambda x: jax.tree.map(lambda label: "ems" if label in SCALES else "rest", labels(x))  # noqa: E731
        transform = optax.partition({"ems": rates, "rest": optax.identity()}, groups)
    for count, updates in enumerate(run(transform, STEPS // 2)):
        assert_multiples(updates, ONES, count)


def test_in_a_scan_and_under_vmap():
    transform = scale_rates(annealed(STEPS))

    @jax.jit
    def updates(gradient):
        def step(state, _):
            found, state = transform.update(gradient, state)
            return state, found

        return jax.lax.scan(step, transform.init(gradient), length=3)[1]

    found = jax.vmap(updates)(jax.tree.map(lambda x: np.stack([x, 2 * x]), ONES))
    for i in range(2):
        for count in range(3):
            assert_multiples(
                jax.tree.map(lambda x, i=i, c=count: x[i, c], found),
                jax.tree.map(lambda x, i=i: (1 + i) * x, ONES),
                count,
            )


def test_zeros_freeze():
    optimizer = optax.chain(optax.adam(1e-2), scale_rates(dict.fromkeys("elm", 0.0)))
    updates = run(optimizer, 2)[-1]
    for label, update in zip(jax.tree.leaves(labels(updates)), jax.tree.leaves(updates), strict=True):
        assert (np.abs(update) > 1e-3).all() if label not in ("e", "l", "m") else not update.any()


def test_dtypes_stay():
    gradients = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), ONES)
    chex.assert_trees_all_equal_shapes_and_dtypes(run(scale_rates(annealed(5)), 1, gradients)[0], gradients)


def test_trees_without_nodes():
    gradients = {"w": np.ones(3), "e": np.ones(2)}
    transform = scale_rates({"e": 0.0})
    updates, _ = transform.update(gradients, transform.init(gradients))
    chex.assert_trees_all_equal(updates, gradients)


def test_what_is_refused():
    with pytest.raises(ValueError, match="unknown scales 'k': choose among e, l, m, n"):
        scale_rates({"e": 1.0, "k": 2.0})
    for steps in (0, -3):
        with pytest.raises(ValueError, match=f"steps must be at least 1, got {steps}"):
            annealed(steps)
