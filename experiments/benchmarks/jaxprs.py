"""What a counter and an interpreter of jaxprs both need to know of their structure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

Path = tuple[int, ...]
"""Where an equation stands: its place in its jaxpr, after that of the equation around it and so on."""

CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
}
"""Primitives whose body runs once -> the parameter that holds it."""


def live(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The program without what no output depends on, which compilers leave out; inputs stay."""
    left, _ = dce_jaxpr(jaxpr.jaxpr, used_outputs=True, instantiate=True)
    return ClosedJaxpr(left, jaxpr.consts)


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr without its constants' values."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def platform_branch(eqn: JaxprEqn, platform: str) -> int | None:
    """Which branch of `platform_dependent` a platform takes; None for a `cond` that depends on data.

    Raises:
      ValueError: there is no branch for it.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return None
    for index, names in enumerate(platforms):
        if names is None or platform in names:
            return index
    raise ValueError(f"no branch for platform {platform!r}, only for {platforms}")


def bodies(eqn: JaxprEqn, platform: str) -> Iterator[tuple[int, Jaxpr]]:
    """Bodies that the equation may run on a platform, with the number that tells them apart in a path."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        yield from enumerate((opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])))
    elif name == "cond":
        chosen = platform_branch(eqn, platform)
        for index, branch in enumerate(params["branches"]):
            if chosen is None or index == chosen:
                yield index, opened(branch)
    elif name in CALLS or name in ("scan", "shard_map"):
        yield 0, opened(params[CALLS.get(name, "jaxpr")])


class Choices(NamedTuple):
    """Paths of the equations that decide by data what runs, in the program's order, outer first."""

    loops: list[Path]
    """Every `while`."""
    conds: dict[Path, int]
    """Every `cond`, but for those that the platform decides -> how many branches it has."""


def choices(jaxpr: Jaxpr, platform: str) -> Choices:
    """The program's, as far as the platform runs it."""
    found = Choices([], {})

    def walk(jaxpr: Jaxpr, path: Path) -> None:
        for place, eqn in enumerate(jaxpr.eqns):
            here = (*path, place)
            if eqn.primitive.name == "while":
                found.loops.append(here)
            elif eqn.primitive.name == "cond" and platform_branch(eqn, platform) is None:
                found.conds[here] = len(eqn.params["branches"])
            for index, body in bodies(eqn, platform):
                walk(body, (*here, index))

    walk(jaxpr, ())
    return found


def constant_trips(eqn: JaxprEqn) -> int | None:
    """Trip count of a `while` that counts from one constant up to another, if it is one."""
    condition, body = opened(eqn.params["cond_jaxpr"]), opened(eqn.params["body_jaxpr"])
    if eqn.params["cond_nconsts"] or [c.primitive.name for c in condition.eqns] != ["lt"]:
        return None
    if condition.outvars[0] is not condition.eqns[0].outvars[0]:
        return None
    counter, bound = condition.eqns[0].invars
    carry = eqn.invars[eqn.params["body_nconsts"] :]
    inside = body.invars[eqn.params["body_nconsts"] :]

    def constant(value: Var | Literal) -> Any:
        """Its value, where it is written in the program and the body hands it on unchanged."""
        if isinstance(value, Literal):
            return value.val
        index = condition.invars.index(value)
        same = body.outvars[index] is inside[index]
        return carry[index].val if same and isinstance(carry[index], Literal) else None

    stop = constant(bound)
    if isinstance(counter, Literal) or stop is None:
        return None
    index = condition.invars.index(counter)
    step = next((e for e in body.eqns if body.outvars[index] in e.outvars), None)
    if step is None or step.primitive.name != "add" or not isinstance(carry[index], Literal):
        return None
    if step.invars[0] is not inside[index] or not isinstance(step.invars[1], Literal):
        return None
    size = int(step.invars[1].val)
    return max(0, -(-(int(stop) - int(carry[index].val)) // size)) if size > 0 else None
