"""What data-dependent loops and branches do on real data: a jaxpr's interpreter that counts as it goes.

It can run the branches of another platform than the machine's: a TPU's products on a CPU, say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Int

from experiments.benchmarks.jaxprs import CALLS, Choices, Path, choices, live, opened, platform_branch


class Measured(NamedTuple):
    """What data decided while a function ran."""

    trips: tuple[float, ...]
    """Of each `while` loop (by `flops.Loop.number`), the mean number of trips each time that it was entered;
    0 for one that never was. A loop over a batch runs as long as its slowest member."""
    shares: tuple[tuple[float, ...], ...]
    """Of each data-dependent `cond`, the share of the times that each branch was taken; all 0 if none was."""


def measure(function: Callable[..., Any], *args: Any, platform: str = "cpu") -> tuple[Any, Measured]:
    """Runs `function(*args)` as `platform` would, and counts.

    Args:
      function: any function that JAX can trace, for one device.
      *args: pytrees of arrays.
      platform: whose branches to run; all of them must be able to run here.

    Returns:
      The function's result, and what was counted.

    Raises:
      ValueError: a loop or a branch stands in a `shard_map`.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    closed = live(closed)
    found = choices(closed.jaxpr, platform)
    interpreter = _Interpreter(platform, found)

    @jax.jit
    def run(consts: list[Array], leaves: list[Array]) -> tuple[list[Array], Counters]:
        return interpreter.body(closed.jaxpr, consts, leaves, (), Counters.zero(found))

    result, counters = run(closed.consts, jax.tree.leaves(args))
    counters = jax.device_get(counters)
    trips = counters.trips / np.maximum(counters.entries, 1)
    shares = counters.taken / np.maximum(counters.taken.sum(axis=1, keepdims=True), 1)
    branches = [tuple(row[:count].tolist()) for row, count in zip(shares, found.conds.values(), strict=True)]
    measured = Measured(tuple(trips.tolist()), tuple(branches))
    return jax.tree.unflatten(jax.tree.structure(shape), result), measured


class Counters(NamedTuple):
    """What the interpreter carries along."""

    entries: Int[Array, " loops"]
    trips: Int[Array, " loops"]
    taken: Int[Array, "conds branches"]

    @classmethod
    def zero(cls, found: Choices) -> Self:
        loops, most = jnp.zeros(len(found.loops), jnp.int32), max(found.conds.values(), default=0)
        return cls(loops, loops, jnp.zeros((len(found.conds), most), jnp.int32))


_Counted = tuple[list[Any], Counters]
"""An equation's or a body's results, and the counters after it."""


@dataclass(frozen=True)
class _Interpreter:
    """Every method takes the counters and gives them back."""

    platform: str
    choices: Choices

    def body(
        self, jaxpr: Jaxpr, consts: list[Any], args: list[Any], path: Path, counters: Counters
    ) -> _Counted:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for place, eqn in enumerate(jaxpr.eqns):
            operands = [read(variable) for variable in eqn.invars]
            results, counters = self._equation(eqn, operands, (*path, place), counters)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars], counters

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Counters) -> _Counted:
        name, params = eqn.primitive.name, eqn.params
        if name == "while":
            return self._while(eqn, operands, path, counters)
        if name == "scan":
            return self._scan(eqn, operands, path, counters)
        if name == "cond":
            return self._cond(eqn, operands, path, counters)
        if name in CALLS:
            return self._closed(params[CALLS[name]], operands, (*path, 0), counters)
        if any(inside[: len(path)] == path for inside in (*self.choices.loops, *self.choices.conds)):
            raise ValueError(f"loops and branches inside {name} cannot be counted")
        # As `jax.core.eval_jaxpr` does it.
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        return (results if eqn.primitive.multiple_results else [results]), counters

    def _closed(self, jaxpr: Any, args: list[Any], path: Path, counters: Counters) -> _Counted:
        return self.body(opened(jaxpr), getattr(jaxpr, "consts", []), args, path, counters)

    def _while(self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Counters) -> _Counted:
        params, number = eqn.params, self.choices.loops.index(path)
        cond_consts, rest = _split(operands, params["cond_nconsts"])
        body_consts, start = _split(rest, params["body_nconsts"])

        def going(carry: list[Any], counters: Counters) -> tuple[Array, Counters]:
            args = [*cond_consts, *carry]
            (going,), counters = self._closed(params["cond_jaxpr"], args, (*path, 0), counters)
            return going, counters

        def step(state: tuple) -> tuple:
            carry, going_on, counters = state
            new, counters = self._closed(params["body_jaxpr"], [*body_consts, *carry], (*path, 1), counters)
            # Of a batch, the members that have ended stay as they are.
            new = [jnp.where(_leading(going_on, old), x, old) for x, old in zip(new, carry, strict=True)]
            counters = counters._replace(trips=counters.trips.at[number].add(1))
            return new, *going(new, counters)

        counters = counters._replace(entries=counters.entries.at[number].add(1))
        state = start, *going(start, counters)
        carry, _, counters = jax.lax.while_loop(lambda state: jnp.any(state[1]), step, state)
        return carry, counters

    def _scan(self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Counters) -> _Counted:
        params = eqn.params
        consts, rest = _split(operands, params["num_consts"])
        start, xs = _split(rest, params["num_carry"])

        def step(state: tuple, xs: list[Any]) -> tuple[tuple, list[Any]]:
            carry, counters = state
            args = [*consts, *carry, *xs]
            results, counters = self._closed(params["jaxpr"], args, (*path, 0), counters)
            carry, ys = _split(results, len(start))
            return (carry, counters), ys

        length, reverse = params["length"], params["reverse"]
        (carry, counters), ys = jax.lax.scan(step, (start, counters), xs, length, reverse=reverse)
        return [*carry, *ys], counters

    def _cond(self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Counters) -> _Counted:
        index, *args = operands
        branches = [
            partial(self._closed, branch, path=(*path, place))
            for place, branch in enumerate(eqn.params["branches"])
        ]
        chosen = platform_branch(eqn, self.platform)
        if chosen is not None:
            return branches[chosen](args, counters=counters)
        number = list(self.choices.conds).index(path)
        counters = counters._replace(taken=counters.taken.at[number, index].add(1))
        return jax.lax.switch(index, [lambda a, c, b=b: b(a, counters=c) for b in branches], args, counters)


def _split(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return values[:count], values[count:]


def _leading(condition: Array, like: Any) -> Array:
    """The condition of a batch's members, for an array that has the batch's axes first."""
    condition = jnp.asarray(condition)
    return condition.reshape(*condition.shape, *[1] * (jnp.ndim(like) - condition.ndim))
