"""Programs whose results have, in each place, what comes from that of the inputs.

A sum over all elements of all arrays is a number that all places may have in common,
however these are cut into arrays; a sum over one of several is not.
"""

from collections.abc import Sequence
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
_SUM, _LINEAR = "reduce_sum", ("add", "convert_element_type")


def pointwise_form(closed: core.ClosedJaxpr, arrays: Sequence[int | None]) -> Any:
    """Returns a program without its shapes, or None if it is not pointwise.

    Two programs of equal forms do the same with each element, numbers included.

    Args:
      closed: the program.
      arrays: which array each input is of, 0, 1, ...; None if it is of none.
    """
    found = [frozenset([i]) if i is not None else frozenset() for i in arrays]
    every = frozenset().union(*found)
    try:
        form, results = _Reader(every).read(closed.jaxpr, closed.consts, found, {})
    except _NotPointwise:
        return None
    complete = all(total in (None, every) for total in results)
    return form if complete else None


class _NotPointwise(Exception):
    """A primitive that may mix the elements of an array, or an array of constants."""


class _Reader:
    """Reads programs over so many arrays."""

    def __init__(self, every: frozenset[int]):
        self.every = every

    def read(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        given: Sequence[frozenset[int]],
        sums: dict[int, frozenset[int]],
    ) -> tuple[Any, Sequence[frozenset[int] | None]]:
        """Returns the form of a program, and what its results are sums of.

        ``given`` are the arrays that inputs are of, and ``sums`` those that an input,
        by its place, is a sum over.
        """
        number: dict[Any, Any] = {
            variable: ("const", _scalar(value))
            for variable, value in zip(jaxpr.constvars, consts, strict=True)
        }
        number |= {variable: i for i, variable in enumerate(jaxpr.invars)}
        arrays = dict(zip(jaxpr.invars, given, strict=True))
        totals = {jaxpr.invars[i]: total for i, total in sums.items()}

        def name_of(atom: Any) -> Any:
            literal = isinstance(atom, core.Literal)
            return ("literal", _scalar(atom.val)) if literal else number[atom]

        def look_up(known: dict[Any, Any], atom: Any) -> Any:
            return None if isinstance(atom, core.Literal) else known.get(atom)

        found = []
        for eqn in jaxpr.eqns:
            name, made = eqn.primitive.name, len(number)
            read = [name_of(x) for x in eqn.invars]
            of = [look_up(arrays, x) or frozenset[int]() for x in eqn.invars]
            parts = [look_up(totals, x) for x in eqn.invars]
            results: Sequence[frozenset[int] | None] = [None] * len(eqn.outvars)
            if name in CALLS:
                (inner,) = _inside(name, eqn)
                within = {i: part for i, part in enumerate(parts) if part is not None}
                form, results = self.read(inner.jaxpr, inner.consts, of, within)
            elif name == _SUM:
                results, form = [self._sum(eqn, of[0], parts)], None
            elif name in _LINEAR and any(part is not None for part in parts):
                results, form = [self._added(parts, eqn.invars)], str(eqn.params)
            else:
                if any(part not in (None, self.every) for part in parts):
                    raise _NotPointwise
                form = self._parameters(name, eqn, of)
            if name == _OF_SHAPES:  # of a scalar, in as many places as there are
                number[eqn.outvars[0]] = read[0]
            else:
                found.append((name, read, form))
                number |= {x: made + i for i, x in enumerate(eqn.outvars)}
            together = frozenset[int]().union(*of)
            for variable, total in zip(eqn.outvars, results, strict=True):
                arrays[variable] = together if total is None else frozenset()
                if total is not None:
                    totals[variable] = total
        read = [name_of(x) for x in jaxpr.outvars]
        return (found, read), [look_up(totals, x) for x in jaxpr.outvars]

    def _sum(self, eqn: Any, of: frozenset[int], parts: Sequence[Any]) -> frozenset:
        """Returns the arrays that a sum is over: one, of which it takes all."""
        dims = len(eqn.invars[0].aval.shape)
        whole = tuple(eqn.params["axes"]) == tuple(range(dims))
        if not whole or len(of) != 1 or len(self.every) < 2 or parts[0] is not None:
            raise _NotPointwise
        return of

    def _added(self, parts: Sequence[Any], atoms: Sequence[Any]) -> frozenset[int]:
        """Returns the arrays of a sum of sums: of other arrays each, or of zero."""
        zeros = [isinstance(x, core.Literal) and x.val == 0 for x in atoms]
        if any(
            part is None and not zero for part, zero in zip(parts, zeros, strict=True)
        ):
            raise _NotPointwise
        known = [part for part in parts if part is not None]
        together = frozenset[int]().union(*known)
        if len(together) != sum(map(len, known)):
            raise _NotPointwise
        return together

    def _parameters(self, name: str, eqn: Any, of: Sequence[frozenset[int]]) -> Any:
        """Returns what a primitive does besides its operands."""
        if name == "cond":
            forms = []
            for inner in _inside(name, eqn):
                form, results = self.read(inner.jaxpr, inner.consts, of[1:], {})
                if any(total not in (None, self.every) for total in results):
                    raise _NotPointwise
                forms.append(form)
            return forms
        if name == _OF_SHAPES:
            if eqn.invars[0].aval.shape:
                raise _NotPointwise
            return None
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
