"""Which inputs of a jaxpr each of its values depends on."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jshard.compat.jaxprs import scan_body, scan_sizes


def dependencies(
    jaxpr: Any, inputs: Sequence[int], *, by_value: bool = False
) -> list[int]:
    """Which inputs each output depends on, as the union of the inputs' bits.

    Calls are followed inside; loops to a fixed point; anything else with an inner
    jaxpr depends, all of it, on everything that enters.

    Args:
      jaxpr: of the outputs.
      inputs: bits of its inputs.
      by_value: what passes an optimization_barrier is what it was; else it needs all
        that passes, as it does where it is computed again.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        entering = [read(atom) for atom in eqn.invars]
        out = equation_dependencies(eqn, entering, by_value=by_value)
        for var, bits in zip(eqn.outvars, out, strict=True):
            env[var] = bits
    return [read(atom) for atom in jaxpr.outvars]


def equation_dependencies(
    eqn: Any, entering: list[int], *, by_value: bool = False
) -> list[int]:
    """The same for one equation."""
    if eqn.primitive.name == "scan":
        return _scan(eqn, entering, by_value)
    if by_value and eqn.primitive.name == "optimization_barrier":
        return entering
    if by_value and eqn.primitive.name == "select_n" and not eqn.invars[0].aval.shape:
        entering = entering[1:]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(entering):
        if eqn.primitive.name not in ("while", "cond"):
            return dependencies(inner, entering, by_value=by_value)
    together = 0
    for bits in entering:
        together |= bits
    return [together] * len(eqn.outvars)


def _scan(eqn: Any, entering: list[int], by_value: bool) -> list[int]:
    body, (num_consts, num_carry) = scan_body(eqn), scan_sizes(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        out = dependencies(body, entering, by_value=by_value)
        merged = [a | b for a, b in zip(entering[carry], out[:num_carry], strict=True)]
        if merged == entering[carry]:
            return out
        entering = [*entering[:num_consts], *merged, *entering[carry.stop :]]
