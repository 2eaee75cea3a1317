"""Operations of matrix products in a compiled program, on one of its devices."""

import json
import math
import re
from collections.abc import Callable
from functools import cache

from experiments.benchmarks.hlo import Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":(\{[^}]*\})')
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([^}]*)\}")


def product_flops(module: Module, trips: Callable[[int], float]) -> float:
    """Operations of all that the entry computation runs, loops' bodies times their trips.

    Args:
      module: compiled for a CPU, where products are `dot`s.
      trips: of a loop whose count XLA does not know: the number of such loops around it -> its trips.

    Raises:
      ValueError: there is a convolution, which is what a TPU's compiler makes of products.
    """

    @cache
    def of(computation: str, depth: int) -> float:
        instructions = {instruction.name: instruction for instruction in module.computations[computation]}
        return sum(instruction_flops(x, instructions, depth) for x in instructions.values())

    def instruction_flops(x: Instruction, siblings: dict[str, Instruction], depth: int) -> float:
        if x.opcode == "convolution":
            raise ValueError(f"{x.name} is a convolution: only products that are `dot`s are counted")
        if x.opcode == "dot":
            return _dot(x, siblings)
        if x.opcode != "while":
            return sum(of(called, depth) for called in x.called)
        known = _TRIPS.search(x.attributes)
        if known:
            return int(json.loads(known[1])["n"]) * sum(of(called, depth) for called in x.called)
        return trips(depth) * sum(of(called, depth + 1) for called in x.called)

    return of(module.entry, 0)


def _dot(x: Instruction, siblings: dict[str, Instruction]) -> float:
    """2 * batch * M * N * K."""
    (left,) = siblings[x.operands[0]].shapes
    contracted = _CONTRACTED.search(x.attributes)[1].split(",")
    return 2.0 * math.prod(x.shapes[0].dims) * math.prod(left.dims[int(axis)] for axis in contracted if axis)
