"""Whether the collectives of a compiled program have one order on every device.

What XLA:CPU guarantees, from its sources: thunks that use a buffer that another writes
wait until that has ended (an execution edge). Collectives of one sequence start in
turn, and each is over when it returns. Of a thunk that has a sequence of its own (a
loop, a branch, a call) neither holds: it may return before its collectives have begun,
and in a program that was read from a cache it shares nothing with those around it.
"""

import itertools

from jshard.plan.cost.transfers import KINDS
from jshard.plan.hlo.program_text import Instruction, Module, parse


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions that devices could enter in different orders.

    Both exchange data, at least one of them has a sequence of its own, and no data
    leads from the first to the second.

    Args:
      text: an optimized program, as ``compiled.as_text()`` gives it.
    """
    module = parse(text)
    pairs = []
    for computation in module.computations.values():
        found = [x for x in computation.instructions if _exchanges(module, x)]
        before: dict[str, set[str]] = {}
        for x in computation.instructions:
            before[x.name] = set(x.operands).union(
                *(before.get(operand, set()) for operand in x.operands)
            )
        pairs += [
            (first.name, second.name)
            for first, second in itertools.combinations(found, 2)
            if first.name not in before[second.name]
            if not (_kind(first) and _kind(second))
        ]
    return pairs


def exchanging(text: str) -> int:
    """How many instructions exchange data, those that only hold others included."""
    module = parse(text)
    computations = module.computations.values()
    return sum(_exchanges(module, x) for c in computations for x in c.instructions)


def _kind(x: Instruction) -> str | None:
    kind = x.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _exchanges(module: Module, x: Instruction) -> bool:
    if _kind(x):
        return True
    inner = [i for c in module.inside(x) for i in c.instructions]
    return any(_exchanges(module, i) for i in inner)
