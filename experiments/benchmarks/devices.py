"""How devices share the optimiser's work: operations on one of them, from the program compiled for all.

On virtual devices of one CPU, which share its cores, time would say nothing. Each number of devices needs a
process of its own: `python -m experiments.benchmarks.devices` is one, and prints its row.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.benchmarks.costs import turns
from experiments.benchmarks.flops import count_flops
from experiments.benchmarks.hlo import collectives, parse
from experiments.benchmarks.hlo_flops import product_flops
from experiments.benchmarks.optimizers import HETERO, ours
from experiments.config import PRESETS
from experiments.model import init_params
from experiments.reporting.pages import Table
from manifold_muon import GramSolver

DEVICES = (1, 2, 4, 8)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class DeviceRow:
    """One step of hetero, by matrix products, with parameters that lie whole on every device."""

    devices: int
    compiled: float
    """Operations of products on one device, in the compiled program. Of branches all are in it."""
    traced: float
    """The same, from the jaxpr, of branches the dearest."""
    collectives: int
    collective_bytes: int
    """What one device sends or receives through them in a step."""
    collectives_in_loops: int


def device_rows(
    preset_name: str, iterations: float, inner: float, devices: Sequence[int] = DEVICES
) -> Iterator[DeviceRow]:
    """A row for each number of devices.

    Args:
      preset_name: whose model's parameters are updated.
      iterations: of the solver.
      inner: trips of the loops inside an iteration.
      devices: how many, in turn.

    Raises:
      RuntimeError: a process failed; the message has what it wrote.
    """
    for count in devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, preset_name, str(count), str(iterations), str(inner)],
            cwd=_ROOT,
            env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the program for {count} devices failed:\n{done.stderr}")
        yield DeviceRow(**json.loads(done.stdout))


def device_row(preset_name: str, count: int, iterations: float, inner: float) -> DeviceRow:
    """The row of this process, which must have that many devices."""
    hetero = ours(HETERO, HETERO, GramSolver(method="products"))
    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.eval_shape(partial(init_params, PRESETS[preset_name].model), jax.random.key(0))
    params, state = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)
        for tree in (params, jax.eval_shape(hetero.optimizer.init, params))
    )
    traced = count_flops(
        hetero.step,
        params,
        state,
        params,
        trips=lambda loop: turns(iterations) if loop.depth == 0 else inner,
        per_device=True,
    )
    module = parse(jax.jit(hetero.step).lower(params, state, params).compile().as_text())
    found = collectives(module)
    return DeviceRow(
        count,
        product_flops(module, lambda depth: turns(iterations) if depth == 0 else inner),
        traced.products,
        len(found),
        sum(collective.bytes for collective in found),
        sum(bool(collective.loops) for collective in found),
    )


def format_device_rows(rows: Sequence[DeviceRow]) -> str:
    """The table, in Markdown; the first row is what the others are compared with."""
    return _TABLE.markdown([(rows[0], row) for row in rows])


_TABLE = Table(
    {
        "devices": lambda pair: str(pair[1].devices),
        "GFLOPs on each": lambda pair: f"{pair[1].compiled / 1e9:,.4g}",
        "of one's": lambda pair: f"1/{pair[0].compiled / pair[1].compiled:.2f}",
        "from the jaxpr": lambda pair: f"1/{pair[0].traced / pair[1].traced:.2f}",
        "collectives": lambda pair: str(pair[1].collectives),
        "MiB through them": lambda pair: f"{pair[1].collective_bytes / 2**20:,.1f}",
        "in loops": lambda pair: str(pair[1].collectives_in_loops),
    },
    left=(),
)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    print(json.dumps(asdict(device_row(name, int(numbers[0]), *map(float, numbers[1:])))))
