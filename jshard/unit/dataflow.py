"""Dataflow analysis: the inputs of a jaxpr that each output depends on."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jshard.compat.jaxprs import open_inner, scan_body, scan_sizes

# rule(eqn, bits of the inputs) -> bits of the outputs, or None for those that follow
# from the equation's inner jaxpr or, without one, from all of its inputs.
Rule = Callable[[Any, list[int]], list[int] | None]


def dependencies(
    jaxpr: Any,
    inputs: Sequence[int],
    rule: Rule = lambda eqn, entering: None,
    consts: Sequence[int] = (),
) -> list[int]:
    """Returns the union of the bits of the inputs that each output depends on.

    Calls are analysed inside, and scans up to a fixed point. Each output of any other
    equation with an inner jaxpr depends on all inputs of that equation.

    Args:
      jaxpr: the program.
      inputs: the bits of its inputs.
      rule: what holds for some equations instead; by default, everything that is needed
        to compute an output counts.
      consts: the bits of its constants, by default 0.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= zip(jaxpr.constvars, consts, strict=False)

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        out = _equation(eqn, list(map(read, eqn.invars)), rule)
        env.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(eqn: Any, entering: list[int], rule: Rule) -> list[int]:
    """Returns the bits of an equation's outputs, given those of its inputs."""
    if (out := rule(eqn, entering)) is not None:
        return out
    if eqn.primitive.name == "scan":
        return _scan(eqn, entering, rule)
    if (inner := open_inner(eqn)) is not None:
        return dependencies(inner, entering, rule)
    return [functools.reduce(operator.or_, entering, 0)] * len(eqn.outvars)


def _scan(eqn: Any, entering: list[int], rule: Rule) -> list[int]:
    body, (num_consts, num_carry) = scan_body(eqn), scan_sizes(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        out = dependencies(body, entering, rule)
        merged = [a | b for a, b in zip(entering[carry], out[:num_carry], strict=True)]
        if merged == entering[carry]:
            return out
        entering = [*entering[:num_consts], *merged, *entering[carry.stop :]]
