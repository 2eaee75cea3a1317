"""HLO text parsed: programs compiled here for eight devices, and the syntax of programs compiled for TPUs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.benchmarks.hlo import Shape, collectives, loop_scope, parse

DEVICES = 8
ROW = 4 * 16  # bytes of a float32 (1, 16)
SIZE = DEVICES * ROW
REPLICATED = P()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def compiled(mesh, function, spec=REPLICATED) -> str:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros((DEVICES, 16))).compile().as_text()


def mean_square(x):
    return lax.psum(jnp.sin(x) ** 2, "data") / DEVICES


def test_a_collective_outside_of_the_loops(mesh):
    def function(x):
        return mean_square(lax.fori_loop(0, 5, lambda _, y: jnp.sin(y) @ jnp.ones((16, 16)), x))

    module = parse(compiled(mesh, function))
    assert any(i.opcode == "while" for i in module.computations[module.entry])
    (found,) = collectives(module)
    assert (found.instruction.base_opcode, found.computation) == ("all-reduce", module.entry)
    assert (found.loops, found.bytes, found.group) == ((), SIZE, DEVICES)
    assert "psum" in found.op_name
    assert module.devices == DEVICES


def test_a_collective_in_a_loop(mesh):
    def function(x):
        with jax.named_scope("solver"):
            return lax.fori_loop(0, 5, lambda _, y: mean_square(y), x)

    module = parse(compiled(mesh, function))
    (found,) = collectives(module)
    (loop,) = found.loops
    assert loop.opcode == "while" and found.computation in loop.called
    assert "solver/while" in loop_scope(module, loop)
    assert found.bytes == SIZE


@pytest.mark.parametrize("inside", ["loop", "conditional", "jit"])
def test_a_collective_deep_in_a_loop(mesh, inside):
    step = {
        "loop": lambda x: lax.while_loop(lambda y: y.sum() > 1, mean_square, x),
        "conditional": lambda x: lax.cond(x.sum() > 1, mean_square, jnp.cos, x),
        "jit": jax.jit(mean_square),
    }[inside]

    def function(x):
        return lax.fori_loop(0, 5, lambda _, y: step(y) + 1, x)

    (found,) = collectives(parse(compiled(mesh, function)))
    assert len(found.loops) == (2 if inside == "loop" else 1)


def test_a_collective_in_the_condition_of_a_loop(mesh):
    def function(x):
        return lax.while_loop(lambda y: lax.psum(y.sum(), "data") > 1, lambda y: y / 2, x)

    (found,) = collectives(parse(compiled(mesh, function, P("data"))))
    assert len(found.loops) == 1 and found.shapes == (Shape("f32", ()),)


def test_a_collective_made_by_the_partitioner(mesh):
    x = jax.ShapeDtypeStruct((DEVICES, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def gram_loop(x):
        return lax.fori_loop(0, 3, lambda _, y: y @ (y.T @ y), x)

    found = collectives(parse(jax.jit(gram_loop).lower(x).compile().as_text()))
    assert [c.instruction.base_opcode for c in found] == ["all-reduce"]
    assert len(found[0].loops) == 1 and found[0].shapes == (Shape("f32", (16, 16)),)


@pytest.mark.parametrize(
    ("operation", "opcode", "size"),
    [
        (lambda x: lax.all_gather(x, "data", tiled=True), "all-gather", SIZE),
        (lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), "reduce-scatter", ROW),
        (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), "all-to-all", ROW),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), "collective-permute", ROW),
    ],
)
def test_kinds_of_collectives(mesh, operation, opcode, size):
    (found,) = collectives(parse(compiled(mesh, operation, P("data"))))
    assert (found.instruction.base_opcode, found.bytes) == (opcode, size)
    assert found.group == (2 if opcode == "collective-permute" else DEVICES)


def test_groups_of_a_mesh_with_two_axes():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    (found,) = collectives(parse(compiled(mesh, lambda x: lax.psum(x, "data"))))
    assert found.group == 4


def stored(name: str) -> str:
    """A short TPU program, in the syntax of libtpu 0.0.42."""
    return (Path(__file__).parent / "hlo" / f"{name}.txt").read_text()


def test_a_tuple_in_a_loop_without_a_name():
    module = parse(stored("loop"))
    assert module.entry == "main.1_spmd" and module.devices == 8
    (found,) = collectives(module)
    assert found.computation == "body.sunk" and [loop.name for loop in found.loops] == ["while.124"]
    assert found.shapes == (Shape("bf16", (768, 2304)), Shape("f32", (768,)))
    assert (found.bytes, found.group) == (768 * 2304 * 2 + 768 * 4, 8)
    # The loop has no name of its own.
    assert loop_scope(module, found.loops[0]) == "jit(step)/transpose(jvp(GPT2))/while/body/dot_general"


def test_a_collective_in_a_fusion_has_its_name():
    (found,) = collectives(parse(stored("fusion")))
    assert (found.computation, found.op_name) == ("all-reduce-scatter", "jit(step)/dot_general")
    assert (found.bytes, found.group, found.loops) == (4096 * 4096 * 4, 4, ())


def test_asynchronous_collectives_count_once():
    found = collectives(parse(stored("asynchronous")))
    assert [(c.instruction.base_opcode, c.bytes, c.group) for c in found] == [
        ("all-gather", 64 * 16 * 4, 8),
        ("collective-permute", 8 * 16 * 4, 2),
        ("all-to-all", 64 * 64 * 2, 2),
        ("all-reduce", 8 * 16 * 4, 4),
    ]


def test_a_chain_is_one_collective_and_in_a_loop_only_as_a_whole():
    """The first starts before the loop and only passes through it; the second is all inside."""
    passing, inside = collectives(parse(stored("chain")))
    assert (passing.instruction.name, passing.computation, passing.loops) == ("all-gather.1", "start", ())
    assert passing.bytes == 16 * 768 * 4
    assert (inside.instruction.name, [loop.name for loop in inside.loops]) == ("all-gather.3", ["while.1"])


def test_empty_replica_groups_are_all_devices():
    text = stored("fusion").replace("{{0,1,2,3},{4,5,6,7}}", "{}")
    (found,) = collectives(parse(text.replace("num_partitions=8", "replica_count=2, num_partitions=8")))
    assert found.group == 16


def test_widths_of_dtypes():
    sizes = {"pred": 3, "s4": 2, "f8e4m3fn": 3, "bf16": 6, "u32": 12, "f64": 24, "c64": 24, "token": 0}
    assert {dtype: Shape(dtype, (3,)).bytes for dtype in sizes} == sizes


@pytest.mark.parametrize(
    "text", ["", "HloModule nothing\n", "HloModule m\n\nENTRY %main (x: f32[]) -> f32[] {\n  nonsense\n}\n"]
)
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match="HLO"):
        parse(text)
