"""Programs whose results have, in each place, what comes from that of the inputs."""

from typing import Any

import numpy as np
from jax.extend import core

from jshard.system.compat.jaxprs import CALLS

_POINTWISE = {
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type",
    "copy", "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh", "xor",
}  # fmt: skip
_OF_SHAPES = "broadcast_in_dim"


def pointwise_form(closed: core.ClosedJaxpr) -> Any:
    """Returns a program without its shapes, or None if it is not pointwise.

    Two programs of equal forms do the same with each element, numbers included: a
    scalar is all that elements of other places may have in common.
    """
    try:
        return _form(closed.jaxpr, closed.consts)
    except _NotPointwise:
        return None


class _NotPointwise(Exception):
    """A primitive that may mix the elements of an array, or an array of constants."""


def _form(jaxpr: core.Jaxpr, consts: Any) -> Any:
    number: dict[Any, Any] = {
        variable: ("const", _scalar(value))
        for variable, value in zip(jaxpr.constvars, consts, strict=True)
    }
    number |= {variable: i for i, variable in enumerate(jaxpr.invars)}

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return "literal", _scalar(atom.val)
        return number[atom]

    found = []
    for eqn in jaxpr.eqns:
        name, made = eqn.primitive.name, len(number)
        if name == _OF_SHAPES:  # of a scalar, in as many places as there are
            if eqn.invars[0].aval.shape:
                raise _NotPointwise
            number[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        found.append((name, [read(x) for x in eqn.invars], _parameters(name, eqn)))
        number |= {variable: made + i for i, variable in enumerate(eqn.outvars)}
    return found, [read(x) for x in jaxpr.outvars]


def _parameters(name: str, eqn: Any) -> Any:
    """Returns what a primitive does besides its operands."""
    if name in CALLS or name == "cond":
        return [_form(inner.jaxpr, inner.consts) for inner in _inside(name, eqn)]
    if name not in _POINTWISE:
        raise _NotPointwise
    return sorted((key, repr(value)) for key, value in eqn.params.items())


def _inside(name: str, eqn: Any) -> list[core.ClosedJaxpr]:
    inner = eqn.params["branches"] if name == "cond" else [eqn.params[CALLS[name]]]
    return [x if hasattr(x, "consts") else core.ClosedJaxpr(x, ()) for x in inner]


def _scalar(value: Any) -> tuple[str, float | complex]:
    array = np.asarray(value)
    if array.shape:
        raise _NotPointwise
    return str(array.dtype), array.item()
