"""Dataflow analysis: the inputs of a jaxpr that each output depends on."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jshard.system.compat import jaxprs

# rule(eqn, bits of the inputs) -> bits of the outputs, or None for those that follow
# from the equation's inner jaxpr or, without one, from all of its inputs.
Rule = Callable[[Any, list[int]], list[int] | None]


def dependencies(
    jaxpr: Any,
    inputs: Sequence[int],
    rule: Rule = lambda eqn, entering: None,
    consts: Sequence[int] = (),
    last: Rule | None = None,
) -> list[int]:
    """Returns the union of the bits of the inputs that each output depends on.

    Calls and branches are analysed inside, and loops up to a fixed point; what a branch
    or a loop returns depends on its condition, too. Each output of any other equation
    with an inner jaxpr depends on all inputs of that equation. ``rule`` says what holds
    for some equations instead. Constants have the bits 0 by default. ``last`` takes the
    place of ``rule`` once the bits of an equation's inputs are final, as they are not
    while a loop's fixed point is sought: it may raise errors.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= zip(jaxpr.constvars, consts, strict=False)

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        out = through(eqn, list(map(read, eqn.invars)), rule, last)
        env.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def union(bits: Sequence[int]) -> int:
    """Returns all bits that are in any of ``bits``."""
    return functools.reduce(operator.or_, bits, 0)


def through(
    eqn: Any, entering: list[int], rule: Rule, last: Rule | None = None
) -> list[int]:
    """Returns the bits of an equation's outputs, given those of its inputs."""
    if (out := (last or rule)(eqn, entering)) is not None:
        return out
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, entering, rule, last)
    if name == "while":
        return loop(eqn, entering, rule, last)[1]
    if name == "cond":
        index, *others = entering
        branches = [
            dependencies(b.jaxpr, others, rule, last=last)
            for b in eqn.params["branches"]
        ]
        return [index | union(bits) for bits in zip(*branches, strict=True)]
    if (inner := jaxprs.open_inner(eqn)) is not None:
        return dependencies(inner, entering, rule, last=last)
    return [union(entering)] * len(eqn.outvars)


def _scan(eqn: Any, entering: list[int], rule: Rule, last: Rule | None) -> list[int]:
    body, (num_consts, num_carry) = jaxprs.scan_body(eqn), jaxprs.scan_sizes(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        out = dependencies(body, entering, rule)
        merged = [a | b for a, b in zip(entering[carry], out[:num_carry], strict=True)]
        if merged == entering[carry]:
            return dependencies(body, entering, rule, last=last) if last else out
        entering = [*entering[:num_consts], *merged, *entering[carry.stop :]]


def loop(
    eqn: Any, entering: list[int], rule: Rule, last: Rule | None = None
) -> tuple[int, list[int]]:
    """Returns the bits of a ``while`` loop's condition, and of its results."""
    goes_on, body, num_goes_on, num_body = jaxprs.while_parts(eqn)
    of_goes_on, rest = entering[:num_goes_on], entering[num_goes_on:]
    of_body, carry = rest[:num_body], rest[num_body:]
    while True:
        (condition,) = dependencies(goes_on.jaxpr, [*of_goes_on, *carry], rule)
        out = dependencies(body.jaxpr, [*of_body, *carry], rule)
        merged = [a | b | condition for a, b in zip(carry, out, strict=True)]
        if merged == carry:
            if last:
                dependencies(goes_on.jaxpr, [*of_goes_on, *carry], rule, last=last)
                dependencies(body.jaxpr, [*of_body, *carry], rule, last=last)
            return condition, carry
        carry = merged
