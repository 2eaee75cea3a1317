"""The FLOP counter, against formulas done by hand and XLA's own analysis of loop-free programs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from experiments.benchmarks.flops import Loop, count_flops
from manifold_muon import DualAscent, Stiefel
from spectral import msign
from spectral.matrix_functions import svd

HIGHEST = jax.lax.Precision.HIGHEST


def shaped(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def product(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x, precision=HIGHEST)


PRODUCT = 2 * 5**3


def test_products_are_two_operations_a_multiplication() -> None:
    count = count_flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shaped(3, 4, 5), shaped(3, 5, 7))
    assert count.products == 2 * 3 * 4 * 5 * 7
    assert count.decompositions == 0
    assert count_flops(jnp.dot, shaped(6), shaped(6)).products == 12
    assert count_flops(jnp.outer, shaped(6), shaped(6)).products == 0  # elementwise
    assert count_flops(lambda a, b: jnp.tensordot(a, b, 2), shaped(2, 3, 4), shaped(3, 4, 5)).products == 240


@pytest.mark.parametrize(
    ("dtype", "precision", "name", "passes"),
    [
        ("bfloat16", None, "bfloat16", 1),
        ("bfloat16", "highest", "bfloat16", 1),
        ("float32", None, "float32 default", 1),
        ("float32", "high", "float32 high", 3),
        ("float32", "highest", "float32 highest", 6),
        ("float32", ("default", "highest"), "float32 highest", 6),
        ("float32", "BF16_BF16_F32_X3", "float32 BF16_BF16_F32_X3", 3),
    ],
)
def test_precisions_are_told_apart_and_weighted(
    dtype: str, precision: object, name: str, passes: int
) -> None:
    x = shaped(5, 5, dtype=dtype)
    count = count_flops(partial(jnp.matmul, precision=precision), x, x)
    assert count.products_by_precision() == {name: PRODUCT}
    assert count.bfloat16_passes == passes * PRODUCT


def test_no_passes_for_a_dtype_that_a_tpu_does_not_multiply() -> None:
    count = count_flops(jnp.matmul, shaped(5, 5, dtype="int32"), shaped(5, 5, dtype="int32"))
    assert count.products == PRODUCT
    with pytest.raises(ValueError, match="int32"):
        _ = count.bfloat16_passes


def test_scans_count_their_length() -> None:
    def chain(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(
            lambda c, _: (jax.lax.fori_loop(0, 3, lambda _, c: product(c), c), None), x, length=4
        )
        return y

    assert count_flops(chain, shaped(5, 5)).products == 12 * PRODUCT
    assert count_flops(jax.vmap(chain), shaped(2, 5, 5)).products == 24 * PRODUCT
    assert count_flops(lambda x: jax.lax.map(product, x), shaped(6, 5, 5)).products == 6 * PRODUCT


def test_a_while_between_constants_tells_its_trips() -> None:
    def loop(x: jax.Array, start: int, stop: int, step: int) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + step, product(c[1])), (start, x))[
            1
        ]

    for bounds, trips in (((0, 7, 1), 7), ((2, 7, 2), 3), ((7, 2, 1), 0)):
        count = count_flops(lambda x, bounds=bounds: loop(x, *bounds), shaped(5, 5))
        assert count.products == trips * PRODUCT


def until_large(x: jax.Array) -> jax.Array:
    def going(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (carry[0] < 50) & (jnp.sum(product(carry[1])) < 1)

    return jax.lax.while_loop(going, lambda c: (c[0] + 1, product(product(c[1]))), (0, x))[1]


def test_a_data_dependent_while_asks_for_its_trips() -> None:
    with pytest.raises(ValueError, match="needs `trips`"):
        count_flops(until_large, shaped(5, 5))
    # Two products in the body, one in the condition, which is computed once more.
    assert count_flops(until_large, shaped(5, 5), trips=4).products == (4 * 2 + 5) * PRODUCT
    assert count_flops(jax.vmap(until_large), shaped(3, 5, 5), trips=4).products == 3 * 13 * PRODUCT


def test_trips_can_depend_on_the_loop() -> None:
    def two(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("first"):
            x = jax.jit(until_large)(x)
        return x, until_large(y)

    def trips(loop: Loop) -> float:
        return 1 if "first" in loop.scope.split("/") else loop.carry[1].shape[0]

    count = count_flops(two, shaped(5, 5), shaped(2, 2), trips=trips)
    assert count.products == 4 * PRODUCT + (2 * 2 + 3) * 16


def test_a_loop_without_products_needs_no_trips() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x)

    assert count_flops(halve, shaped(5)).products == 0


def test_of_branches_the_dearest_counts_and_of_platforms_the_one_asked_for() -> None:
    def branches(x: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.switch(index, [lambda x: x, lambda x: product(product(x)), product], x)

    assert count_flops(branches, shaped(5, 5), shaped(dtype="int32")).products == 2 * PRODUCT
    x = shaped(3, 5, 5)
    cpu, tpu = (count_flops(svd, x, platform=platform) for platform in ("cpu", "tpu"))
    assert cpu.decompositions_by_name() == tpu.decompositions_by_name() == {"svd": 3 * 26 * 5**3}

    def by_platform(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=lambda x: jnp.linalg.eigh(x)[1], tpu=product, cuda=product)

    assert count_flops(by_platform, shaped(5, 5)).decompositions_by_name() == {"eigh": 9 * 5**3}
    for function, shape in ((by_platform, (5, 5)), (jax.vmap(by_platform), (1, 5, 5))):
        assert count_flops(function, shaped(*shape), platform="tpu").products == PRODUCT
    with pytest.raises(ValueError, match="rocm"):
        count_flops(by_platform, shaped(5, 5), platform="rocm")


@pytest.mark.parametrize(
    ("function", "shapes", "operations"),
    [
        (partial(jnp.linalg.svd, full_matrices=False), [(2, 8, 5)], 2 * (6 * 8 * 5**2 + 20 * 5**3)),
        (partial(jnp.linalg.svd, compute_uv=False), [(2, 8, 5)], 2 * (2 * 8 * 5**2 + 2 * 5**3)),
        (jnp.linalg.svd, [(2, 5, 8)], 2 * (4 * 8**2 * 5 + 22 * 5**3)),
        (jnp.linalg.eigh, [(2, 5, 5)], 2 * 9 * 5**3),
        (jnp.linalg.qr, [(2, 8, 5)], 2 * (4 * 8 * 5**2 - 4 * 5**3 / 3)),
        (jnp.linalg.cholesky, [(2, 5, 5)], 2 * 5**3 / 3),
        (jax.scipy.linalg.lu_factor, [(2, 5, 5)], 2 * 2 * 5**3 / 3),
        (jax.scipy.linalg.solve_triangular, [(2, 5, 5), (2, 5, 8)], 2 * 5**2 * 8),
    ],
)
def test_decompositions_have_formulas(function: Callable, shapes: list[tuple], operations: float) -> None:
    count = count_flops(function, *(shaped(*shape) for shape in shapes))
    assert count.decompositions == pytest.approx(operations)
    assert count.products == 0


def test_bodies_of_calls_are_entered() -> None:
    @jax.custom_vjp
    def with_vjp(x: jax.Array) -> jax.Array:
        return product(x)

    with_vjp.defvjp(lambda x: (product(x), x), lambda x, g: (product(g) + product(x),))

    @jax.custom_jvp
    def with_jvp(x: jax.Array) -> jax.Array:
        return product(x)

    with_jvp.defjvp(lambda x, t: (product(x[0]), product(t[0])))
    x = shaped(5, 5)
    for call in (jax.jit(product), jax.checkpoint(product), with_vjp, with_jvp):
        assert count_flops(call, x).products == PRODUCT
    assert count_flops(jax.value_and_grad(lambda x: jnp.sum(with_vjp(x))), x).products == 3 * PRODUCT


def test_rematerialisation_is_counted_where_it_is_asked_for() -> None:
    def loss(x: jax.Array, body: object) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, _: (body(c), None), x, length=3)[0])

    plain = count_flops(jax.grad(lambda x: loss(x, lambda c: product(product(c)))), shaped(5, 5))
    again = count_flops(
        jax.grad(lambda x: loss(x, jax.checkpoint(lambda c: product(product(c))))), shaped(5, 5)
    )
    assert plain.products == 3 * 6 * PRODUCT
    assert again.products > plain.products


def test_a_shard_map_is_counted_for_all_devices_or_for_one() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data")
    sharded = jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
    x = shaped(8, 5, 5)
    assert count_flops(sharded, x).products == 8 * PRODUCT
    assert count_flops(sharded, x, per_device=True).products == 2 * PRODUCT
    mapped = jax.pmap(lambda x: product(x))
    assert count_flops(mapped, x).products == 8 * PRODUCT
    assert count_flops(mapped, x, per_device=True).products == PRODUCT


def test_what_is_not_known_is_refused() -> None:
    kernel, image = shaped(3, 3, 1, 1), shaped(1, 8, 8, 1)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    with pytest.raises(ValueError, match="conv_general_dilated"):
        count_flops(convolve, image, kernel)
    with pytest.raises(ValueError, match="custom_linear_solve"):
        count_flops(jnp.linalg.solve, shaped(5, 5), shaped(5, 5))
    assert count_flops(lambda x: x.at[0].add(1.0).max(), shaped(5)).products == 0


def test_products_are_grouped_by_the_innermost_scope() -> None:
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            x = product(x)
            with jax.named_scope("inner"):
                x, _ = jax.lax.scan(lambda c, _: (jax.jit(product)(c), None), x, length=3)
        return product(x)

    count = count_flops(step, shaped(5, 5))
    groups = count.products_by_scope(("outer", "inner"))
    assert groups == {"outer": PRODUCT, "inner": 3 * PRODUCT, "other": PRODUCT}
    assert count.products_by_scope(("product",)) == {"product": 3 * PRODUCT, "other": 2 * PRODUCT}
    batch = count_flops(jax.vmap(step), shaped(2, 5, 5)).products_by_scope(("outer", "inner"))
    assert batch == {name: 2 * operations for name, operations in groups.items()}
    assert count.products == 5 * PRODUCT == (count + count).products / 2


def test_newton_schulz_by_hand() -> None:
    batch, m, n, steps = 2, 12, 4, 6
    muon = optax.contrib.scale_by_muon(
        ns_steps=steps, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )
    x = shaped(batch, m, n)
    count = count_flops(lambda g, state: muon.update(g, state)[0], x, jax.eval_shape(muon.init, x))
    assert count.products == batch * steps * (2 * m * n**2 + 2 * n**3 + 2 * m * n**2)
    assert count.products_by_precision().keys() == {"float32 default"}


def test_dual_ascent_is_its_matrix_signs_and_small_products() -> None:
    batch, m, n, iterations = 2, 12, 4, 3
    solver = DualAscent(iterations=iterations)
    x = shaped(batch, m, n)
    sign = count_flops(partial(msign, steps=solver.msign_steps), x).products
    # Each iteration: a sign, W L and W^T A; the start W^T G; the last needs no W^T A.
    count = count_flops(lambda g, w: solver(g, w, Stiefel()).direction, x, x)
    assert count.products == iterations * (sign + batch * 2 * 2 * m * n**2)
    assert count.products_by_precision().keys() == {"float32 highest"}


@pytest.mark.parametrize("gradient", [False, True])
def test_agrees_with_xla_where_there_is_no_loop(gradient: bool) -> None:
    def network(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.maximum(x @ w, 0) @ w.T)

    function = jax.grad(network) if gradient else network
    w, x = shaped(64, 96), shaped(128, 64)
    compiled = jax.jit(function).lower(w, x).compile().cost_analysis()["flops"]
    counted = count_flops(function, w, x).products
    # XLA counts elementwise operations too: a few for each of the 128 x 96 activations.
    assert counted <= compiled <= 1.05 * counted
