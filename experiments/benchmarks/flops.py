"""Floating-point operations of a function, counted from its jaxpr: nothing is compiled or executed.

XLA's own cost analysis counts a loop's body once, a decomposition as about nothing, and a float32 product at
full precision like one of bfloat16. Here bodies are multiplied by their trip counts, decompositions have
textbook formulas, and every product keeps the precision it is asked for. Only matrix products and
decompositions are counted: elementwise operations and reductions, of a lower order, are left out.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from experiments.benchmarks.decompositions import DECOMPOSITIONS, UNKNOWN_DECOMPOSITIONS
from experiments.benchmarks.jaxprs import (
    CALLS,
    Choices,
    Path,
    choices,
    constant_trips,
    live,
    opened,
    platform_branch,
)

PRODUCT = "product"

BFLOAT16_PASSES: dict[str, int] = {
    "bfloat16": 1,
    "float32 default": 1,
    "float32 high": 3,
    "float32 highest": 6,
    "float32 BF16_BF16_F32": 1,
    "float32 BF16_BF16_F32_X3": 3,
    "float32 BF16_BF16_F32_X6": 6,
    "float32 BF16_BF16_F32_X9": 9,
}
"""Passes through a TPU's bfloat16 matrix unit that one product takes, by its operands' precision: XLA splits
a float32 operand into three bfloat16 terms and keeps six of their nine products at `highest`, three at
`high`; at `default` it rounds."""


class Loop(NamedTuple):
    """A `while` whose trip count its jaxpr does not tell."""

    scope: str
    """Named scopes and jitted functions around it, outermost first, joined by `/`."""
    carry: tuple[jax.core.AbstractValue, ...]
    number: int
    """Of this loop among all the program's `while` loops on the platform, from 0, outer before inner."""
    depth: int
    """Number of `while` loops around it."""


Trips = float | Callable[[Loop], float]
"""Trip count of the data-dependent loops: one for all, or one for each."""
Shares = Callable[[int], Sequence[float]]
"""Number of a data-dependent `cond` among the program's, from 0 -> how often each branch runs, as a share."""


class Kind(NamedTuple):
    """What a number of operations is spent on."""

    operation: str
    """`product`, or a decomposition's name."""
    precision: str
    """Of a product's operands: a key of `BFLOAT16_PASSES`, or another dtype's name; of a decomposition,
    its dtype."""
    scope: str
    """As `Loop.scope`."""


@dataclass(frozen=True)
class Flops:
    """Numbers of operations; a multiplication and an addition are two."""

    counts: Counter[Kind]

    @property
    def products(self) -> float:
        """Of matrix products, whatever their precision."""
        return self.total(lambda kind: kind.operation == PRODUCT)

    @property
    def decompositions(self) -> float:
        """Of eigh, svd and the like, by their textbook formulas."""
        return self.total(lambda kind: kind.operation != PRODUCT)

    @property
    def bfloat16_passes(self) -> float:
        """Of matrix products, each times the bfloat16 passes it takes on a TPU (`BFLOAT16_PASSES`).

        Raises:
          ValueError: a product's operands have a dtype that no TPU's matrix unit takes.
        """
        by_precision = self.products_by_precision()
        if unknown := by_precision.keys() - BFLOAT16_PASSES.keys():
            raise ValueError(f"products of {', '.join(sorted(unknown))} have no count of bfloat16 passes")
        return sum(BFLOAT16_PASSES[precision] * count for precision, count in by_precision.items())

    def total(self, where: Callable[[Kind], bool]) -> float:
        """The operations of some kinds."""
        return sum(count for kind, count in self.counts.items() if where(kind))

    def products_by_precision(self) -> dict[str, float]:
        """Precision -> operations of the matrix products."""
        return self._by(lambda kind: kind.precision if kind.operation == PRODUCT else None)

    def decompositions_by_name(self) -> dict[str, float]:
        """Name -> operations of the decompositions."""
        return self._by(lambda kind: None if kind.operation == PRODUCT else kind.operation)

    def products_by_scope(self, names: Collection[str], other: str = "other") -> dict[str, float]:
        """Name -> operations of the matrix products in the scope of that name.

        Args:
          names: of `jax.named_scope`s or jitted functions; inside several, the innermost counts.
          other: where none of them is found.
        """

        def innermost(kind: Kind) -> str | None:
            if kind.operation != PRODUCT:
                return None
            # A transformed scope reads `vmap(name)`.
            return next((name for name in reversed(re.split("[/()]", kind.scope)) if name in names), other)

        return self._by(innermost)

    def _by(self, group: Callable[[Kind], str | None]) -> dict[str, float]:
        grouped: Counter[str] = Counter()
        for kind, count in self.counts.items():
            if (name := group(kind)) is not None:
                grouped[name] += count
        return dict(grouped)

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.counts + other.counts)


def count_flops(
    function: Callable[..., Any],
    *args: Any,
    platform: str = "cpu",
    trips: Trips | None = None,
    shares: Shares | None = None,
    per_device: bool = False,
) -> Flops:
    """The operations of `function(*args)`.

    Loops: a `scan` (and a `fori_loop` with fixed bounds, which is one) runs its body `length` times; a
    `while` that only counts from one constant to another as often as it says; any other as `trips` says. Of
    the branches of a `cond` that depends on data, the dearest counts; of `platform_dependent`, that of
    the platform. What no output depends on does not count: compilers leave it out.

    Args:
      function: any function that JAX can trace; bind static arguments with `functools.partial`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      platform: `cpu`, `tpu`, `cuda` or `rocm`, whichever machine this runs on.
      trips: of the data-dependent `while` loops.
      shares: of the branches of data-dependent `cond`s, instead of the dearest for all.
      per_device: count the body of a `shard_map` for one device, not for all of its mesh. What stands
        outside of every `shard_map` is counted as if each device did the whole of it.

    Raises:
      ValueError: a data-dependent loop is met and `trips` is None, the platform has no branch, or products
        stand in an operation that this counter does not know.
    """
    program = live(jax.make_jaxpr(function)(*args)).jaxpr
    walk = _Walk(platform, trips, shares, per_device, choices(program, platform))
    return Flops(walk.body(program, "", ()))


@dataclass(frozen=True)
class _Walk:
    platform: str
    trips: Trips | None
    shares: Shares | None
    per_device: bool
    choices: Choices

    def body(self, jaxpr: Jaxpr | ClosedJaxpr, scope: str, path: Path) -> Counter[Kind]:
        counts: Counter[Kind] = Counter()
        for place, eqn in enumerate(opened(jaxpr).eqns):
            here = _join(scope, str(eqn.source_info.name_stack))
            counts.update(self._equation(eqn, here, (*path, place)))
        return counts

    def _equation(self, eqn: JaxprEqn, scope: str, path: Path) -> Counter[Kind]:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            return Counter({Kind(PRODUCT, _precision(eqn), scope): _product(eqn)})
        if name in DECOMPOSITIONS:
            dtype = eqn.invars[0].aval.dtype.name
            return Counter({Kind(name, dtype, scope): DECOMPOSITIONS[name](eqn)})
        if name == "while":
            return self._while(eqn, scope, path)
        if name == "cond":
            return self._cond(eqn, scope, path)
        if name == "scan":
            return _times(self.body(params["jaxpr"], scope, (*path, 0)), params["length"])
        if name == "shard_map":
            shape = params["mesh"].shape
            devices = math.prod(shape[axis] for axis in params["newly_manual_axes"])
            counts = self.body(params["jaxpr"], scope, (*path, 0))
            return counts if self.per_device else _times(counts, devices)
        if name in CALLS:
            return self.body(params[CALLS[name]], _join(scope, params.get("name", "")), (*path, 0))
        if name in _UNCOUNTED or any(self.body(inner, scope, path) for inner in _inner(eqn)):
            raise ValueError(f"{name} at {scope or 'the top level'} is no operation that can be counted")
        return Counter()

    def _while(self, eqn: JaxprEqn, scope: str, path: Path) -> Counter[Kind]:
        condition = self.body(eqn.params["cond_jaxpr"], scope, (*path, 0))
        body = self.body(eqn.params["body_jaxpr"], scope, (*path, 1))
        if not body and not condition:
            return body
        count = constant_trips(eqn)
        if count is None:
            if self.trips is None:
                raise ValueError(f"the while loop at {scope or 'the top level'} needs `trips`")
            given = self.trips(self._loop(eqn, scope, path)) if callable(self.trips) else self.trips
            count = float(given)
        # The condition is computed once more than the body.
        return _times(body, count) + _times(condition, count + 1)

    def _loop(self, eqn: JaxprEqn, scope: str, path: Path) -> Loop:
        carry = eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
        depth = sum(path[: len(outer)] == outer for outer in self.choices.loops) - 1
        return Loop(scope, tuple(value.aval for value in carry), self.choices.loops.index(path), depth)

    def _cond(self, eqn: JaxprEqn, scope: str, path: Path) -> Counter[Kind]:
        chosen = platform_branch(eqn, self.platform)
        branches = eqn.params["branches"]
        if chosen is not None:
            return self.body(branches[chosen], scope, (*path, chosen))
        counts = [self.body(branch, scope, (*path, index)) for index, branch in enumerate(branches)]
        if self.shares is None:
            return max(counts, key=lambda count: sum(count.values()))
        shares = self.shares(list(self.choices.conds).index(path))
        return sum((_times(*pair) for pair in zip(counts, shares, strict=True)), Counter())


_UNCOUNTED = UNKNOWN_DECOMPOSITIONS | {
    "conv_general_dilated",
    "ragged_dot_general",
    "symmetric_product",
    "pallas_call",
    "ffi_call",
}


def _product(eqn: JaxprEqn) -> float:
    """2 * batch * M * N * K: every entry of the result is a sum of K products."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)


def _precision(eqn: JaxprEqn) -> str:
    dtypes = {value.aval.dtype.name for value in eqn.invars}
    dtype = "float32" if "float32" in dtypes else " x ".join(sorted(dtypes))
    if dtype != "float32":
        return dtype
    precision = eqn.params["precision"]
    if precision is None:
        return "float32 default"
    if isinstance(precision, tuple):
        # Precision.DEFAULT < HIGH < HIGHEST; XLA takes the higher of the operands'.
        return f"float32 {max(precision, key=lambda p: p.value).name.lower()}"
    return f"float32 {precision}"


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr))
    return (leaf for leaf in leaves if isinstance(leaf, Jaxpr | ClosedJaxpr))


def _join(*scopes: str) -> str:
    return "/".join(scope for scope in scopes if scope)


def _times(counts: Counter[Kind], factor: float) -> Counter[Kind]:
    return Counter({kind: count * factor for kind, count in counts.items() if factor > 0})
