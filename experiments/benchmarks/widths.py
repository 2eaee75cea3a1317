"""How the optimiser's cost grows with the width n, at the fixed proportions m/n of GPT-2's matrices."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.benchmarks.costs import ACCELERATOR, Position, measured_step, step_flops
from experiments.benchmarks.optimizers import HETERO, optax_muon, ours
from experiments.benchmarks.race import JaxRacer, race
from experiments.benchmarks.workload import Workload, of_width
from experiments.reporting.pages import Table

WIDTHS = (64, 128, 256, 512, 768)


@dataclass(frozen=True)
class WidthRow:
    """hetero against optax's Muon on two layers of one width: 3n x n, n x n and twice 4n x n matrices."""

    width: int
    seconds: float
    ratio: float
    """Of the times."""
    products: float
    """hetero's operations of matrix products on an accelerator."""
    products_ratio: float
    passes_ratio: float
    """The same, weighted by bfloat16 passes."""


def width_rows(workloads: Sequence[Workload] = tuple(map(of_width, WIDTHS))) -> Iterator[WidthRow]:
    """Both optimisers side by side at each width, on gradients of a model that wide."""
    for workload in workloads:
        params = workload.initial_params()
        reference, hetero = (
            JaxRacer(contender, params) for contender in (optax_muon(), ours(HETERO, HETERO))
        )
        seconds = defaultdict(list)
        for name, _, taken in race((reference, hetero), workload):
            if taken is not None:
                seconds[name].append(taken)
        tokens, flops = next(workload.batches()), []
        for racer in (reference, hetero):
            position = Position(racer.params, racer.state, workload.gradient(racer.params, tokens))
            measured = measured_step(racer.contender, position, ACCELERATOR)
            flops.append(step_flops(racer.contender, racer.params, ACCELERATOR, measured))
        median = {name: float(np.median(times)) for name, times in seconds.items()}
        yield WidthRow(
            workload.model.width,
            median[hetero.name],
            median[hetero.name] / median[reference.name],
            flops[1].products,
            flops[1].products / flops[0].products,
            flops[1].bfloat16_passes / flops[0].bfloat16_passes,
        )


def format_width_rows(rows: Sequence[WidthRow]) -> str:
    """The table, in Markdown."""
    return _TABLE.markdown(rows)


_TABLE = Table(
    {
        "n": lambda row: str(row.width),
        "hetero, s/step": lambda row: f"{row.seconds:.3g}",
        "time to optax's": lambda row: f"{row.ratio:.2f}",
        "GFLOPs, accelerator": lambda row: f"{row.products / 1e9:,.4g}",
        "to optax's": lambda row: f"{row.products_ratio:.2f}",
        "bf16 passes to optax's": lambda row: f"{row.passes_ratio:.2f}",
    },
    left=(),
)
