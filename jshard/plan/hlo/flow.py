"""Dataflow through a compiled program: what values depend on, and what is summed up.

A value is an array of an instruction's result: (the instruction's name, its element of
a tuple, else 0).
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from jshard.plan.hlo.hlo import Instruction, Module

# They hand on what they are given, element by element or as it is.
_SAME = {"bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier"}
_SAME |= {"copy-start", "copy-done", "async-done", "async-update"}
_SUMS = ("reduce_scatter", "psum", "psum_invariant", "all_to_all")
_CASTS = ("convert_element_type", "transpose", "mul", "div")


def _runs(x: Instruction) -> str | None:
    """The computation that an instruction runs, the loop's body for a while."""
    roles = (
        x.called[role] for role in ("body", "calls", "to_apply") if role in x.called
    )
    return next((names[0] for names in roles), None)


def dependencies(module: Module, inputs: Mapping[str, int]) -> dict[str, list[int]]:
    """What the values of each instruction depend on, as the union of inputs' bits.

    Args:
      module: the program.
      inputs: bits of the entry's parameters, by name.
    """
    found: dict[str, list[int]] = {}

    def run(computation: str, given: Sequence[Sequence[int]]) -> list[int]:
        for x in module.computations[computation].instructions:
            if x.opcode == "parameter":
                found[x.name] = list(given[x.number])
            else:
                entering = [
                    found[name] if element is None else [found[name][element]]
                    for name, element in x.reads
                ]
                found[x.name] = evaluate(x, entering)
        return found[module.computations[computation].root.name]

    def evaluate(x: Instruction, given: list[list[int]]) -> list[int]:
        called, together = _runs(x), _union(bit for bits in given for bit in bits)
        if x.opcode == "tuple":
            return list(map(_union, given))
        if x.opcode == "get-tuple-element":
            return [given[0][x.number] if x.number < len(given[0]) else together]
        if x.opcode == "while" and called:
            carry = given[0]
            while True:
                out = run(called, [carry])
                merged = [a | b for a, b in zip(carry, out, strict=True)]
                if merged == carry:
                    return carry
                carry = merged
        if x.opcode in ("fusion", "call") and called:
            return run(called, given)
        if x.opcode == "async-start" and called:
            run(called, given)  # (its values may have the buffers)
        same = x.opcode in _SAME and len(given) == 1
        if same and len(given[0]) == len(x.arrays):
            return given[0]
        return [together] * len(x.arrays)

    entry = module.entry
    parameters = {
        x.number: x.name for x in entry.instructions if x.opcode == "parameter"
    }
    numbers = range(max(parameters, default=-1) + 1)  # (an unused one may be left out)
    run(entry.name, [[inputs.get(parameters.get(n, ""), 0)] for n in numbers])
    return found


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def readers(module: Module) -> Callable[[str, int | None], list[Instruction]]:
    """A function: the instructions that compute with a value (None: with any)."""
    users: dict[str, list[tuple[Instruction, int | None]]] = {}
    for x in module.instructions.values():
        for name, element in x.reads:
            takes = x.number if x.opcode == "get-tuple-element" else element
            users.setdefault(name, []).append((x, takes))

    def read(name: str, element: int | None) -> list[Instruction]:
        found = []
        for x, takes in users.get(name, ()):
            if None in (element, takes) or element == takes:
                passes = x.opcode in ("get-tuple-element", "bitcast")
                found += read(x.name, None) if passes else [x]
        return found

    return read


def summed(module: Module) -> set[tuple[str, int]]:
    """Values that are summed over devices as they are.

    Casts in between, and loops that carry them, are followed.
    """
    home = {
        x.name: y.name for y in module.computations.values() for x in y.instructions
    }
    callers = {name: x for x in module.instructions.values() if (name := _runs(x))}

    def sources(name: str, element: int) -> list[tuple[str, int]]:
        """Where a value comes from unchanged but for its dtype and its layout."""
        x = module.instructions[name]
        read = [(operand, of or 0) for operand, of in x.reads]
        if x.opcode == "get-tuple-element":
            return [(x.operands[0], x.number)]
        if x.opcode == "tuple":
            return [read[element]]
        if x.opcode in _SAME:
            return [(x.operands[0], element)] if len(x.arrays) > 1 else read[:1]
        called = module.computations.get(_runs(x) or "")
        if x.opcode == "while" and called:
            return [(x.operands[0], element), (called.root.name, element)]
        if x.opcode == "parameter":
            caller = callers.get(home[name])
            if caller is None or caller.opcode != "while":
                return []
            return [(caller.name, element)]
        inside = {y.opcode for y in called.instructions} if called else set()
        if x.source.endswith(_CASTS) and inside and "dot" not in inside:
            return [
                value
                for value in read
                if _size(module, *value) == _size(module, name, element)
            ]
        return []

    found: set[tuple[str, int]] = set()
    todo = [
        (name, element or 0)
        for x in module.instructions.values()
        if x.source.rpartition("/")[2] in _SUMS and x.opcode != "fusion"
        if not x.opcode.endswith("done") and x.opcode != "get-tuple-element"
        for name, element in x.reads
    ]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += sources(*here)
    return found


def _size(module: Module, name: str, element: int) -> int:
    return module.instructions[name].arrays[element].size
