"""One optimiser's line in the table, and the table."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.costs import ACCELERATOR, HERE, Position, measured_step, step_flops
from experiments.benchmarks.flops import Flops
from experiments.benchmarks.optimizers import Contender
from experiments.benchmarks.quality import Quality, judge
from experiments.benchmarks.race import JaxRacer, Racer
from experiments.benchmarks.trips import Measured
from experiments.reporting.pages import Table, text
from manifold_muon import assign, constraint_violations, to_tall
from spectral.paths import named_leaves


@dataclass(frozen=True)
class Operations:
    """Of one step on one platform."""

    products: float
    bfloat16_passes: float
    """The products, each weighted by the bfloat16 passes that a TPU makes for its precision."""
    decompositions: dict[str, float]
    """Name -> operations by textbook formula."""

    @classmethod
    def of(cls, flops: Flops) -> "Operations":
        return cls(flops.products, flops.bfloat16_passes, flops.decompositions_by_name())


@dataclass(frozen=True)
class Iterations:
    """Of the solver, over the timed steps, without the matrices that never take any: those with a solution in
    closed form."""

    median: float
    """Over all matrices."""
    median_of_stacks: float
    """Over all stacks, each of which goes on until its slowest matrix is done."""
    most: int


@dataclass(frozen=True)
class Row:
    """What was measured of one optimiser; None where there is nothing to measure."""

    name: str
    seconds: list[float]
    """Of each timed step."""
    ratio: float
    """Median of `seconds` over that of the reference."""
    here: Operations | None = None
    """On this machine's path: eigendecompositions, one matrix after the other."""
    accelerator: Operations | None = None
    """On the path of GPUs and TPUs: products alone, whole stacks at once."""
    temporaries: int | None = None
    """Bytes that the compiled step allocates besides its arguments and results."""
    iterations: Iterations | None = None
    achieved: float | None = None
    """Median over the judged matrices of `Quality.achieved`."""
    achieved_least: float | None = None
    tangency: float | None = None
    """Largest over the judged matrices."""
    violation: float | None = None
    """Largest over all matrices, after the last step."""


def timed_row(racer: Racer, seconds: Sequence[float], reference: Sequence[float]) -> Row:
    """A row with nothing but times: the racer's, and the reference's to compare them with.

    A racer that was stopped is compared over the rounds that it took part in: a machine's speed drifts.
    """
    return Row(racer.name, list(seconds), float(np.median(seconds) / np.median(reference[: len(seconds)])))


def full_row(
    row: Row, racer: JaxRacer, gradient: Any, layers: Sequence[int], on_accelerator: Measured
) -> Row:
    """All that can be measured of an optimiser that has made its timed steps.

    Args:
      row: its times.
      racer: the optimiser, before its next step.
      gradient: at its parameters.
      layers: whose directions are judged, and on which is counted how often loops run here.
      on_accelerator: see `costs.measured_step`.
    """
    contender = racer.contender
    position = Position(racer.params, racer.state, gradient).of_layers(layers)
    here = step_flops(contender, racer.params, HERE, measured_step(contender, position, HERE))
    accelerator = step_flops(contender, racer.params, ACCELERATOR, on_accelerator)
    row = replace(
        row,
        here=Operations.of(here),
        accelerator=Operations.of(accelerator),
        temporaries=racer.temporaries,
        iterations=_iterations(racer),
    )
    if contender.directions is None:
        return row
    judged = _judged(contender, position)
    achieved = [quality.achieved for quality in judged]
    violations = constraint_violations(racer.params, contender.assignment)
    return replace(
        row,
        achieved=float(np.nanmedian(achieved)),
        achieved_least=float(np.nanmin(achieved)),
        tangency=max(quality.tangency for quality in judged),
        violation=max(float(violation.max()) for violation in violations.values()),
    )


def _judged(contender: Contender, position: Position) -> list[Quality]:
    found = jax.jit(contender.directions)(position.gradient, position.state, position.params)
    params = dict(named_leaves(position.params))
    qualities = []
    for name, assigned in assign(position.params, contender.assignment).items():
        g, a, w = (np.asarray(to_tall(x)) for x in (found.g[name], found.a[name], params[name]))
        manifold = assigned.manifold.with_radius(1.0)
        each = zip(g, a / assigned.radius, w / assigned.radius, strict=True)
        qualities += [judge(*matrices, manifold) for matrices in each]
    return qualities


def _iterations(racer: JaxRacer) -> Iterations | None:
    names = (
        [name for name in racer.iterations[0] if any(made[name].any() for made in racer.iterations)]
        if racer.iterations
        else []
    )
    if not names:
        return None
    params, stacks = dict(named_leaves(racer.params)), defaultdict(list)
    assigned = assign(racer.params, racer.contender.assignment)
    for name in names:
        stacks[jax.eval_shape(to_tall, params[name]).shape[1:], assigned[name].manifold].append(name)
    slowest = [
        max(made[name].max() for name in stack) for made in racer.iterations for stack in stacks.values()
    ]
    each = np.concatenate([made[name] for made in racer.iterations for name in names])
    return Iterations(float(np.median(each)), float(np.median(slowest)), int(each.max()))


def format_rows(rows: Sequence[Row]) -> str:
    """The table, in Markdown."""
    return _TABLE.markdown(rows)


def _giga(operations: Operations | None, value: Callable[[Operations], float]) -> str:
    return text(None if operations is None else value(operations) / 1e9, ",.4g")


def _iterations_text(row: Row) -> str:
    made = row.iterations
    return "–" if made is None else f"{made.median:g}, {made.median_of_stacks:g}, {made.most}"


_TABLE = Table(
    {
        "optimiser": lambda row: row.name,
        "s/step": lambda row: f"{np.median(row.seconds):.3g}",
        "ratio": lambda row: f"{row.ratio:.2f}",
        "GFLOPs": lambda row: _giga(row.here, lambda x: x.products),
        "GFLOPs, decompositions": lambda row: _giga(row.here, lambda x: sum(x.decompositions.values())),
        "GFLOPs, accelerator": lambda row: _giga(row.accelerator, lambda x: x.products),
        "bf16 passes, accelerator": lambda row: _giga(row.accelerator, lambda x: x.bfloat16_passes),
        "temporaries, MiB": lambda row: text(row.temporaries and row.temporaries / 2**20, ",.0f"),
        "iterations: median, of stacks, most": _iterations_text,
        "of the optimum": lambda row: text(row.achieved, ".3f"),
        "least": lambda row: text(row.achieved_least, ".3f"),
        "tangency": lambda row: text(row.tangency, ".1e"),
        "violation": lambda row: text(row.violation, ".1e"),
    },
    left=["optimiser"],
)
