"""How often data-dependent loops run on real data: a jaxpr's interpreter that counts trips as it goes.

It can run the branches of another platform than the machine's: a TPU's products on a CPU, say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from experiments.benchmarks.jaxprs import CALLS, Path, live, opened, platform_branch, while_loops


def measure_trips(function: Callable[..., Any], *args: Any, platform: str = "cpu") -> tuple[Any, np.ndarray]:
    """Runs `function(*args)` as `platform` would, and counts.

    Args:
      function: any function that JAX can trace, for one device.
      *args: pytrees of arrays.
      platform: whose branches to run; all of them must be able to run here.

    Returns:
      The function's result, and for each `while` loop (by `flops.Loop.number`) the mean number of trips each
      time that it was entered; NaN for one that never was. A loop over a batch runs as long as its slowest
      member.

    Raises:
      ValueError: a loop stands in a `shard_map`.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    closed = live(closed)
    loops = while_loops(closed.jaxpr, platform)
    interpreter = _Interpreter(platform, {path: number for number, path in enumerate(loops)})

    @jax.jit
    def run(consts: list[Array], leaves: list[Array]) -> tuple[list[Array], Array]:
        counters = jnp.zeros((2, len(loops)), jnp.int32)
        return interpreter.body(closed.jaxpr, consts, leaves, (), counters)

    result, (entries, trips) = run(closed.consts, jax.tree.leaves(args))
    mean = np.divide(trips, entries, out=np.full(len(loops), np.nan), where=np.asarray(entries) > 0)
    return jax.tree.unflatten(jax.tree.structure(shape), result), mean


@dataclass(frozen=True)
class _Interpreter:
    """Every method takes and gives the counters: entries and trips of each loop."""

    platform: str
    numbers: dict[Path, int]

    def body(
        self, jaxpr: Jaxpr, consts: list[Any], args: list[Any], path: Path, counters: Array
    ) -> tuple[list[Any], Array]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else values[variable]

        for place, eqn in enumerate(jaxpr.eqns):
            operands = [read(variable) for variable in eqn.invars]
            results, counters = self._equation(eqn, operands, (*path, place), counters)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars], counters

    def _equation(
        self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Array
    ) -> tuple[list[Any], Array]:
        name, params = eqn.primitive.name, eqn.params
        if name == "while":
            return self._while(eqn, operands, path, counters)
        if name == "scan":
            return self._scan(eqn, operands, path, counters)
        if name == "cond":
            return self._cond(eqn, operands, path, counters)
        if name in CALLS:
            return self._closed(params[CALLS[name]], operands, (*path, 0), counters)
        if any(loop[: len(path)] == path for loop in self.numbers):
            raise ValueError(f"loops inside {name} cannot be counted")
        # As `jax.core.eval_jaxpr` does it.
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        return (results if eqn.primitive.multiple_results else [results]), counters

    def _closed(self, jaxpr: Any, args: list[Any], path: Path, counters: Array) -> tuple[list[Any], Array]:
        return self.body(opened(jaxpr), getattr(jaxpr, "consts", []), args, path, counters)

    def _while(
        self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Array
    ) -> tuple[list[Any], Array]:
        params, number = eqn.params, self.numbers[path]
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, body_consts, start = (
            operands[: split[0]],
            operands[split[0] : split[1]],
            operands[split[1] :],
        )

        def going(carry: list[Any], counters: Array) -> tuple[Array, Array]:
            args = [*cond_consts, *carry]
            (going,), counters = self._closed(params["cond_jaxpr"], args, (*path, 0), counters)
            return going, counters

        def step(state: tuple) -> tuple:
            carry, going_on, counters = state
            new, counters = self._closed(params["body_jaxpr"], [*body_consts, *carry], (*path, 1), counters)
            # Of a batch, the members that have ended stay as they are.
            new = [jnp.where(_leading(going_on, old), x, old) for x, old in zip(new, carry, strict=True)]
            return new, *going(new, counters.at[1, number].add(1))

        state = start, *going(start, counters.at[0, number].add(1))
        carry, _, counters = jax.lax.while_loop(lambda state: jnp.any(state[1]), step, state)
        return carry, counters

    def _scan(
        self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Array
    ) -> tuple[list[Any], Array]:
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

    def _cond(
        self, eqn: JaxprEqn, operands: list[Any], path: Path, counters: Array
    ) -> tuple[list[Any], Array]:
        index, *args = operands
        branches = [
            partial(self._closed, branch, path=(*path, place))
            for place, branch in enumerate(eqn.params["branches"])
        ]
        chosen = platform_branch(eqn, self.platform)
        if chosen is not None:
            return branches[chosen](args, counters=counters)
        return jax.lax.switch(index, [lambda a, c, b=b: b(a, counters=c) for b in branches], args, counters)


def _split(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return values[:count], values[count:]


def _leading(condition: Array, like: Any) -> Array:
    """The condition of a batch's members, for an array that has the batch's axes first."""
    condition = jnp.asarray(condition)
    return condition.reshape(*condition.shape, *[1] * (jnp.ndim(like) - condition.ndim))
