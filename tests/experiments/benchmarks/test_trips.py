"""Trip counts measured by interpretation: against loops whose trips are known, and the plain result."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.flops import Loop, count_flops
from experiments.benchmarks.trips import measure
from spectral import msign
from spectral.matrix_functions import svd


def halvings(x: jax.Array) -> jax.Array:
    """x halved until it is below 1, with one 1 x 1 product each time."""
    half = jnp.full((1, 1), 0.5)
    return jax.lax.while_loop(lambda x: jnp.all(x >= 1), lambda x: x @ half, x.reshape(1, 1)).reshape(())


def test_trips_of_a_loop() -> None:
    for start, expected in ((0.5, 0), (1.0, 1), (100.0, 7)):
        result, (trips, _) = measure(halvings, jnp.asarray(start))
        assert trips == (expected,)
        assert result == start / 2**expected


def test_a_batch_runs_as_long_as_its_slowest_member() -> None:
    x = jnp.asarray([0.5, 100.0, 4.0])
    result, (trips, _) = measure(jax.vmap(halvings), x)
    assert trips == (7,)
    chex.assert_trees_all_equal(result, jax.vmap(halvings)(x))
    result, (trips, _) = measure(partial(jax.lax.map, halvings), x)
    assert trips == pytest.approx(((0 + 7 + 3) / 3,))
    chex.assert_trees_all_equal(result, jax.vmap(halvings)(x))


def nested(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outer loop: halves until below 1; inner: counts up to x."""

    def inner(limit: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c < limit, lambda c: c + 1, jnp.zeros(()))

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, total = carry
        with jax.named_scope("inner"):
            return x / 2, total + jax.jit(inner)(x)

    return jax.lax.while_loop(lambda carry: carry[0] >= 1, body, (x, jnp.zeros(())))


def test_inner_trips_are_a_mean_over_entries() -> None:
    result, (trips, _) = measure(nested, jnp.asarray(8.0))
    assert result == (0.5, 15.0)
    np.testing.assert_allclose(trips, [4, (8 + 4 + 2 + 1) / 4])
    _, (trips, _) = measure(nested, jnp.asarray(0.5))
    assert trips == (0, 0)
    chex.assert_trees_all_equal(
        measure(jax.vmap(nested), jnp.asarray([8.0, 2.0, 0.1]))[0],
        jax.vmap(nested)(jnp.asarray([8.0, 2.0, 0.1])),
    )


def test_numbers_are_the_counters_own() -> None:
    def two(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            y = halvings(x)
        with jax.named_scope("second"):
            return y + jax.jit(halvings)(x * 8)

    seen = {}

    def trips(loop: Loop) -> float:
        seen[loop.scope.split("/")[0]] = (loop.number, loop.depth)
        return measured[loop.number]

    _, (measured, _) = measure(two, jnp.asarray(16.0))
    np.testing.assert_array_equal(measured, [5, 8])
    assert count_flops(two, jnp.asarray(16.0), trips=trips).products == 2 * (5 + 8)
    assert seen == {"first": (0, 0), "second": (1, 0)}


def test_branches_of_another_platform_run_here() -> None:
    def root(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=jnp.sqrt, default=lambda x: halvings(x) + nested(x)[1])

    result, (trips, _) = measure(root, jnp.asarray(16.0))
    assert result == 4 and trips == ()
    result, (trips, _) = measure(root, jnp.asarray(16.0), platform="tpu")
    assert result == 0.5 + 31
    np.testing.assert_allclose(trips, [5, 5, 31 / 5])
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    for platform in ("cpu", "tpu"):
        chex.assert_trees_all_close(measure(svd, x, platform=platform)[0], svd(x), atol=1e-5)


def test_other_control_flow_gives_the_plain_result() -> None:
    @jax.custom_jvp
    def with_jvp(x: jax.Array) -> jax.Array:
        return halvings(x)

    with_jvp.defjvp(lambda x, t: (with_jvp(*x), t[0]))

    def mixed(x: dict[str, jax.Array], index: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.lax.switch(index, [halvings, lambda x: nested(x)[1], jnp.sqrt], x["a"])
        z, ys = jax.lax.scan(lambda c, i: (c + with_jvp(i), c * i), y, x["b"], reverse=True)
        return z, ys, jnp.sort(x["b"]), msign(x["c"])

    x = {"a": jnp.asarray(9.0), "b": jnp.arange(5.0), "c": jax.random.normal(jax.random.key(0), (4, 3))}
    for index in range(3):
        result, (trips, shares) = measure(mixed, x, jnp.asarray(index))
        chex.assert_trees_all_close(result, mixed(x, index), rtol=1e-6)
        # with_jvp on 0, ..., 4: 0 + 1 + 2 + 2 + 3 halvings
        np.testing.assert_allclose(trips[-1], 8 / 5)
        assert (trips[0] > 0) == (index == 0)
        assert shares == (tuple(float(i == index) for i in range(3)),)


def test_branches_count_by_the_share_of_the_times_that_they_run() -> None:
    def one_or_two(x: jax.Array) -> jax.Array:
        small = jnp.sum(x) < 1
        return jax.lax.cond(small, lambda x: x @ x, lambda x: x @ x @ x, x)

    x = jnp.ones((4, 2, 2)) * jnp.asarray([0.1, 0.2, 3, 0.1])[:, None, None]
    function = partial(jax.lax.map, one_or_two)
    result, (_, shares) = measure(function, x)
    chex.assert_trees_all_equal(result, function(x))
    # XLA's index of a condition: False is 0.
    assert shares == ((0.25, 0.75),)
    assert count_flops(function, x, shares=shares.__getitem__).products == (3 * 1 + 1 * 2) * 16
    assert count_flops(function, x).products == 4 * 2 * 16


def test_loops_in_a_shard_map_are_refused() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.shard_map(jax.vmap(halvings), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(ValueError, match="shard_map"):
        measure(sharded, jnp.ones(2))
