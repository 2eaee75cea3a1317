"""`make bench`: optimisers side by side, the share of a training step, how the cost grows and divides."""

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments.benchmarks.costs import ACCELERATOR, Position, inner_trips, measured_step
from experiments.benchmarks.devices import DEVICES, device_rows, format_device_rows
from experiments.benchmarks.optimizers import HETERO, REFERENCE, contenders, ours
from experiments.benchmarks.race import JaxRacer, Racer, race
from experiments.benchmarks.rows import Operations, Row, format_rows, full_row, timed_row
from experiments.benchmarks.share import share
from experiments.benchmarks.torch_muon import TorchRacer, find_torch
from experiments.benchmarks.trips import Measured
from experiments.benchmarks.widths import WIDTHS, format_width_rows, width_rows
from experiments.benchmarks.workload import GPT2_SMALL, TINY, Workload, of_width
from experiments.config import preset
from experiments.files import write_json

_NOTES = """\
- s/step: median of an optimiser's own update and its application, compiled, buffers donated; the gradient, of
  real text at its own parameters, is not in it. All take their steps in turn, in one process. ratio: to
  {reference}.
- GFLOPs: of matrix products in a step, loops' bodies times the trips that they make on the last gradient;
  decompositions by textbook formulas; elementwise work is left out. accelerator: the path of GPUs and TPUs
  (stacks at once, products alone), with what the loops do on the tiny model. bf16 passes: those products
  weighted by the passes of a TPU's matrix unit (float32 at full precision 6, at JAX's default 1, bfloat16 1).
- temporaries: what the compiled step allocates besides its arguments and results.
- iterations of the solver, over the timed steps: the median matrix, the median stack (which goes on until its
  slowest matrix is done), the most. Matrices solved in closed form are left out.
- of the optimum: <G, A> of the next direction, made tangent and scaled into the unit ball, over a bound that
  no direction exceeds (weak duality, in float64; within about 0.3 % of the optimum): the median of the judged
  matrices, and the least. tangency: of the direction as it is; violation: of the constraint after the step;
  the largest of each."""


def run_bench(bench_dir: Path, workloads: Sequence[Workload], iterations: float | None = None) -> Path:
    """Measures everything, prints tables as they are ready, and keeps all numbers in one file.

    Args:
      bench_dir: where `bench.json` goes, written anew after each part.
      workloads: on which optimisers are compared, the first of them small: what the solver's loops do on an
        accelerator's path is measured there.
      iterations: of the solver in the share of a training step; None takes the small workload's median.

    Returns:
      The file's path.
    """
    bench_dir.mkdir(parents=True, exist_ok=True)
    path, results = bench_dir / "bench.json", {"environment": environment()}

    def keep(part: str, value: Any) -> None:
        results[part] = value
        write_json(path, results)

    on_accelerator: dict[str, Measured] = {}
    for workload in workloads:
        rows = compare(workload, on_accelerator)
        print(f"\n{workload.name}, {describe(workload)}\n\n{format_rows(rows)}\n", flush=True)
        keep(workload.name, [asdict(row) for row in rows])
        if workload is workloads[0]:
            hetero = next(row for row in rows if row.name == HETERO)
            iterations = hetero.iterations.median if iterations is None else iterations
    print(_NOTES.format(reference=REFERENCE), flush=True)
    measured = on_accelerator[HETERO]
    keep("share", print_share(measured, iterations, hetero.iterations.median_of_stacks))
    rows = list(width_rows([of_width(width) for width in WIDTHS]))
    print(f"\nhetero against {REFERENCE} by width\n\n{format_width_rows(rows)}", flush=True)
    keep("widths", [asdict(row) for row in rows])
    inner = inner_trips(ours(HETERO, HETERO), TINY.initial_params(), ACCELERATOR, measured)
    rows = list(device_rows("gpt2-small", iterations, inner, DEVICES))
    print(f"\nhetero on gpt2-small by devices\n\n{format_device_rows(rows)}", flush=True)
    keep("devices", [asdict(row) for row in rows])
    return path


def compare(workload: Workload, on_accelerator: dict[str, Measured]) -> list[Row]:
    """Every optimiser on one workload.

    Args:
      workload: what they are measured on.
      on_accelerator: name -> what data decides on an accelerator's path; the missing are measured, and added.
    """
    params = workload.initial_params()
    racers: list[Racer] = [JaxRacer(contender, params) for contender in contenders()]
    if torch := find_torch():
        racers.insert(2, TorchRacer(torch, params))
    else:
        print("torch.optim.Muon is not compared: there is no torch with it here", flush=True)
    del params
    seconds = defaultdict(list)
    for name, step, taken in race(racers, workload):
        if taken is not None:
            seconds[name].append(taken)
        time = "not timed" if taken is None else f"{taken:.3f} s"
        print(f"{workload.name}, step {step}, {name}: {time}", flush=True)
    tokens, rows = next(workload.batches()), []
    for racer in racers:
        row = timed_row(racer, seconds[racer.name], seconds[REFERENCE])
        if isinstance(racer, JaxRacer):
            gradient = workload.gradient(racer.params, tokens)
            if racer.name not in on_accelerator:
                position = Position(racer.params, racer.state, gradient)
                on_accelerator[racer.name] = measured_step(racer.contender, position, ACCELERATOR)
            row = full_row(row, racer, gradient, workload.judged_layers, on_accelerator[racer.name])
            print(f"{workload.name}, judged {racer.name}", flush=True)
        rows.append(row)
    return rows


def describe(workload: Workload) -> str:
    """The model, and what gradients are of."""
    model, parameters = workload.model, jax.tree.leaves(jax.eval_shape(workload.initial_params))
    count = sum(leaf.size for leaf in parameters)
    return (
        f"{model.layers} layers of width {model.width}, vocabulary {model.vocab_size}: {count:,} parameters; "
        f"gradients of {workload.batch_size} x {workload.length} tokens"
    )


def print_share(measured: Measured, iterations: float, of_stacks: float) -> list[dict[str, Any]]:
    """The share of GPT-2 small's training step that hetero takes on an accelerator, in words.

    Args:
      measured: what data decides in hetero's step, on an accelerator's path.
      iterations: of the solver, of the median matrix.
      of_stacks: of the median stack.

    Returns:
      The numbers, for each of the two numbers of iterations.
    """
    config = preset("gpt2-small")
    print(
        f"\ngpt2-small at {config.data.batch_size} x {config.model.context} tokens: one step of hetero on an "
        "accelerator, relative to forward and backward",
        flush=True,
    )
    kept = []
    for made, whose in ((iterations, "the median matrix"), (of_stacks, "the median stack")):
        found = share(config, ours(HETERO, HETERO), measured, made)
        print(
            f"- at {made:g} iterations ({whose}): {found.optimizer.products / 1e12:.3f} of "
            f"{found.model.products / 1e12:.3f} TFLOPs, {found.products:.1%}; weighted by bf16 passes "
            f"{found.bfloat16_passes:.1%}. "
            + ", ".join(f"{part} {portion:.0%}" for part, portion in found.parts().items()),
            flush=True,
        )
        kept.append(
            {
                "iterations": made,
                "model": asdict(Operations.of(found.model)),
                "optimizer": asdict(Operations.of(found.optimizer)),
                "parts": found.parts(),
            }
        )
    return kept


def environment() -> dict[str, Any]:
    """The machine and the versions."""
    packages = {name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    torch = find_torch()
    return {
        "python": platform.python_version(),
        "versions": packages | ({"torch": torch.__version__} if torch else {}),
        "platform": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "cores": len(os.sched_getaffinity(0)),
    }


def main(
    preset_name: Annotated[Literal["tiny", "gpt2-small"], tyro.conf.arg(name="preset")] = "gpt2-small",
    dir: Path = Path("runs/bench"),
    iterations: float | None = None,
) -> None:
    """Compare optimisers' time, operations, memory and directions; print tables and write bench.json.

    Args:
        preset_name: Largest parameters that optimisers are compared on. tiny always comes first; gpt2-small
            takes about an hour on two cores, and 15 GiB.
        dir: Folder of bench.json.
        iterations: Of the solver in the share of a training step; by default tiny's median.
    """
    workloads = [TINY] if preset_name == "tiny" else [TINY, GPT2_SMALL]
    print(f"All numbers: {run_bench(dir, workloads, iterations)}")


if __name__ == "__main__":
    tyro.cli(main)
