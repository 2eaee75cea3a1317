"""GPT-2 small's training step compiled ahead of time for real TPU topologies, on a machine that has no TPU.

`make tpu-check` runs it in an environment with libtpu. It tells whether the step fits a chip, where its
operations go, and every collective between chips. A collective in a solver's loop makes it fail.
"""

import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks.costs import ACCELERATOR, Position, trips, turns
from experiments.benchmarks.flops import Flops, count_flops
from experiments.benchmarks.hlo import Collective, Instruction, Module, collectives, loop_scope, parse
from experiments.benchmarks.optimizers import Contender
from experiments.benchmarks.workload import TINY
from experiments.config import Run, Solver, preset
from experiments.errors import InputError
from experiments.model import GPT2
from experiments.optimizers import make_optimizer, manifolds
from experiments.reporting.pages import Table
from experiments.train import TrainState, init_state, make_train_step, mean_loss

GIB = 2**30
HBM: dict[str, int] = {"v5e": 16 * GIB, "v6e": 32 * GIB}
"""Generation -> bytes of a chip's memory."""
AXIS = "data"
_DIFFERENTIATED = "jvp("
"""In the `op_name` of all that belongs to the loss and its gradient, and of nothing else."""


class Memory(NamedTuple):
    """Bytes on one chip."""

    arguments: int
    results: int
    """But for those that take the place of a donated argument."""
    temporaries: int
    program: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Memory":
        stats = compiled.memory_analysis()
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes - stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
        )


def with_batch(config: Run, chips: int) -> Run:
    """The run with its own batch size, or the least that gives each chip a sequence."""
    return replace(config, data=replace(config.data, batch_size=max(config.data.batch_size, chips)))


def data_parallel(config: Run, mesh: Mesh) -> tuple[TrainState, jax.ShapeDtypeStruct]:
    """The training step's arguments as shapes: the state on every device whole, the sequences divided."""
    state = jax.eval_shape(partial(init_state, config, make_optimizer(config)))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), state)
    tokens = jax.ShapeDtypeStruct(
        (config.data.batch_size, config.model.context + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    return state, tokens


def contender(config: Run) -> Contender:
    """The run's optimizer."""
    return Contender(config.optimizer.name, make_optimizer(config), manifolds(config))


def measured_trips(config: Run) -> Sequence[float]:
    """Trips of the optimizer's loops (by `Loop.number`) in a training that is under way.

    Measured on the tiny model with this machine, which runs what an accelerator would run.
    """
    # At the peak rates, where a step moves the weights most and the last solution helps least.
    optimizer = replace(config.optimizer, warmup_steps=0)
    tiny = contender(replace(config, model=TINY.model, optimizer=optimizer))
    params = tiny.prepare(TINY.initial_params())
    state, step = tiny.optimizer.init(params), jax.jit(tiny.step)
    for tokens in islice(TINY.batches(), TINY.warm_steps):
        gradient = TINY.gradient(params, tokens)
        params, state = step(params, state, gradient)
    return trips(tiny, Position(params, state, TINY.gradient(params, tokens)), ACCELERATOR)


class Part(NamedTuple):
    """A part of the training step, and what one chip does for it."""

    name: str
    products: float
    """Operations of matrix products."""
    bfloat16_passes: float
    """The products, each times the passes through the matrix unit that its precision takes."""

    @classmethod
    def of(cls, name: str, flops: Flops) -> "Part":
        return cls(name, flops.products, flops.bfloat16_passes)


def count_parts(
    config: Run, state: TrainState, chips: int, iterations: float, measured: Sequence[float]
) -> list[Part]:
    """The operations of one training step on one chip.

    Args:
      config: of the run.
      state: shapes on a mesh, from `data_parallel`.
      chips: which divide the batch.
      iterations: of the solver.
      measured: trips of the loops within its iterations, by `Loop.number`.
    """

    def model(remat: bool) -> Part:
        loss = partial(mean_loss, GPT2(replace(config.model, remat=remat)))
        tokens = jax.ShapeDtypeStruct((config.data.batch_size // chips, config.model.context + 1), jnp.int32)
        flops = count_flops(jax.value_and_grad(loss), state.params, tokens, platform=ACCELERATOR)
        return Part.of("forward and backward", flops)

    optimizer = count_flops(
        contender(config).step,
        state.params,
        state.opt_state,
        state.params,
        platform=ACCELERATOR,
        trips=lambda loop: turns(iterations) if loop.depth == 0 else measured[loop.number],
        per_device=True,
    )
    once, whole = model(remat=False), model(remat=config.model.remat)
    again = (b - a for a, b in zip(once[1:], whole[1:], strict=True))
    return [once, Part("forward again (remat)", *again), Part.of("optimizer", optimizer)]


def in_solvers(module: Module, found: Sequence[Collective]) -> list[Collective]:
    """The collectives that stand in a loop which is not the model's, such as the scan over its layers."""

    def of_the_model(loop: Instruction) -> bool:
        return _DIFFERENTIATED in loop_scope(module, loop)

    return [c for c in found if not all(map(of_the_model, c.loops))]


_SILENT = ("while", "body", "closed_call", "checkpoint")


def _scope(op_name: str) -> str:
    """An `op_name` without the words that say nothing, and without the name of the whole program."""
    return "/".join(part for part in op_name.split("/")[1:] if part not in _SILENT) or "–"


def _loops(module: Module, found: Collective) -> str:
    return " > ".join(_scope(loop_scope(module, loop)) for loop in found.loops) or "–"


def _arrays(found: Collective) -> str:
    return ", ".join(f"{n} x {s}" if n > 1 else s for s, n in Counter(map(str, found.shapes)).items())


_COLLECTIVES = Table(
    {
        "collective": lambda row: row[1].instruction.base_opcode,
        "arrays": lambda row: _arrays(row[1]),
        "MiB": lambda row: f"{row[1].bytes / 2**20:.3f}",
        "chips": lambda row: str(row[1].group),
        "computation": lambda row: "entry" if row[1].computation == row[0].entry else row[1].computation,
        "in the loop": lambda row: _loops(*row),
        "from": lambda row: _scope(row[1].op_name),
    },
    left=("collective", "arrays", "computation", "in the loop", "from"),
)
_PARTS = Table(
    {
        "a chip's products of": lambda row: row[1].name,
        "GFLOP": lambda row: f"{row[1].products / 1e9:.1f}",
        "to forward and backward": lambda row: f"{row[1].products / row[0].products:.1%}",
        "GFLOP x bfloat16 passes": lambda row: f"{row[1].bfloat16_passes / 1e9:.1f}",
        "to forward and backward's": lambda row: f"{row[1].bfloat16_passes / row[0].bfloat16_passes:.1%}",
    },
    left=("a chip's products of",),
)


def check_topology(config: Run, topology: str, iterations: float, measured: Sequence[float]) -> list[str]:
    """Compiles the training step for a topology, prints what there is to know, and tells what is wrong.

    Args:
      config: of the run.
      topology: generation and shape, such as `v5e:2x4`.
      iterations: of the solver.
      measured: trips of the loops within its iterations.

    Raises:
      InputError: the memory of this generation is not known.
    """
    generation = topology.split(":")[0]
    if generation not in HBM:
        raise InputError(f"unknown TPU generation {generation!r}: choose one of {', '.join(HBM)}")
    description = topologies.get_topology_desc(topology, "tpu")
    chips = len(description.devices)
    mesh = topologies.make_mesh(description, (chips,), (AXIS,))
    config = with_batch(config, chips)
    state, tokens = data_parallel(config, mesh)
    print(
        f"\n{topology}, {chips} chips: {config.data.batch_size} x {config.model.context} tokens, "
        f"{config.optimizer.name} by {config.optimizer.solver}, {iterations:g} iterations",
        flush=True,
    )
    parts = count_parts(config, state, chips, iterations, measured)
    print(_PARTS.markdown([(parts[0], part) for part in parts]), flush=True)
    start = time.perf_counter()
    try:
        compiled = make_train_step(config, contender(config).optimizer).lower(state, tokens).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return [f"{topology}: the step does not fit a chip: {error}"]
    print(f"Compiled in {time.perf_counter() - start:.0f} s.")
    return _examine(compiled, topology, HBM[generation])


def _examine(compiled: jax.stages.Compiled, topology: str, capacity: int) -> list[str]:
    memory = Memory.of(compiled)
    each = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory._asdict().items())
    total = sum(memory)
    print(f"Memory of a chip in GiB: {each}; {total / GIB:.2f} of {capacity / GIB:.0f}.")
    flops = compiled.cost_analysis()["flops"]
    print(f"XLA's own count, each loop's body once: {flops / 1e9:.1f} GFLOP a chip.")
    module = parse(compiled.as_text())
    found = collectives(module)
    print(_COLLECTIVES.markdown([(module, c) for c in found]))
    failures = [
        f"{topology}: {c.instruction.base_opcode} of {_arrays(c)} in a loop of {_scope(c.op_name)}"
        for c in in_solvers(module, found)
    ]
    if total > capacity:
        failures.append(f"{topology}: {total / GIB:.2f} GiB do not fit a chip's {capacity / GIB:.0f}")
    return failures


def check(
    names: Annotated[tuple[str, ...], tyro.conf.arg(name="topologies")] = ("v5e:2x4", "v5e:16x16"),
    optimizer: str = "hetero",
    solver: Solver = "gram",
    iterations: float = 6,
) -> None:
    """Compile GPT-2 small's training step for TPUs, and fail if it does not fit or partitions badly.

    Args:
        names: Topologies, each by generation and shape.
        optimizer: adamw, or an assignment: none, stiefel, dgram, oblique, hetero, hetero-inv.
        solver: Of the tangent step: gram, or dual_ascent.
        iterations: Of the solver `gram`, for the count of operations; by default the median of a tiny run.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("libtpu is not installed here: `make tpu-check` makes an environment that has it")
    config = preset("gpt2-small").with_optimizer(optimizer).with_solver(solver)
    measured = measured_trips(config)
    failures = [failure for name in names for failure in check_topology(config, name, iterations, measured)]
    for failure in failures:
        print(f"FAILURE: {failure}")
    if failures:
        sys.exit(1)
    print("No collective stands in a solver's loop, and every step fits.")


if __name__ == "__main__":
    try:
        tyro.cli(check)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
