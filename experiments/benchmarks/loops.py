"""Trip counts of loops that a jaxpr tells."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


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


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
