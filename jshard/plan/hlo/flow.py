"""Dataflow through a compiled program: dependencies, readers, and summed values.

A value is one array of an instruction's result, identified by the instruction's name
and an index into the result's tuple (0 if the result is no tuple).
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from jshard.plan.hlo.program_text import Computation, Instruction, Module

# Opcodes whose result is their operand, possibly in another dtype or layout.
_SAME = {"bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier"}
_SAME |= {"copy-start", "copy-done", "async-done", "async-update"}
_SUMS = ("reduce_scatter", "psum", "psum_invariant", "all_to_all")
_CASTS = ("convert_element_type", "transpose", "mul", "div")


def dependencies(module: Module, inputs: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the bits of each array of each instruction's result, by its name.

    They are the union of the ``inputs``' bits that it depends on: those of the entry's
    parameters, by name.
    """
    found: dict[str, list[int]] = {}

    def run(computation: Computation, given: Sequence[Sequence[int]]) -> list[int]:
        for x in computation.instructions:
            if x.opcode == "parameter":
                found[x.name] = list(given[x.number])
            else:
                read = [
                    found[name] if element is None else [found[name][element]]
                    for name, element in x.reads
                ]
                found[x.name] = evaluate(x, read)
        return found[computation.root.name]

    def evaluate(x: Instruction, given: list[list[int]]) -> list[int]:
        called = _called(module, x)
        together = _union(bits for operand in given for bits in operand)
        if x.opcode == "tuple":
            return list(map(_union, given))
        if x.opcode == "get-tuple-element":
            return [given[0][x.number] if x.number < len(given[0]) else together]
        if x.opcode == "while" and called:
            carry, before = given[0], None
            while carry != before:  # until the loop adds no dependency
                before, out = carry, run(called, [carry])
                carry = [a | b for a, b in zip(carry, out, strict=True)]
            return carry
        if branches := _branches(module, x):
            outs = [run(b, [of]) for b, of in zip(branches, given[1:], strict=True)]
            which = _union(given[0])
            return [which | _union(bits) for bits in zip(*outs, strict=True)]
        if x.opcode in ("fusion", "call") and called:
            return run(called, given)
        if x.opcode == "async-start" and called:
            run(called, given)  # buffers may belong to values inside
        if x.opcode in _SAME and len(given) == 1 and len(given[0]) == len(x.arrays):
            return given[0]
        return [together] * len(x.arrays)

    parameters = module.entry.parameters
    given = [[0] for _ in range(max(parameters, default=-1) + 1)]  # XLA may skip some
    for number, x in parameters.items():
        given[number] = [inputs.get(x.name, 0)]
    run(module.entry, given)
    return found


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)


def _branches(module: Module, x: Instruction) -> list[Computation]:
    """Returns those of a conditional, each of which takes one of its operands."""
    return list(module.inside(x)) if x.opcode == "conditional" else []


def _called(module: Module, x: Instruction) -> Computation | None:
    """Returns the computation that an instruction runs; of a while loop, the body."""
    for role in ("body", "calls", "to_apply"):
        if role in x.called:
            return module.computations.get(x.called[role][0])
    return None


def readers(module: Module) -> Callable[[str, int | None], list[Instruction]]:
    """Returns a function that lists the instructions that compute with a value.

    Its arguments are the name and the element, or None for all elements.
    """
    users: dict[str, list[tuple[Instruction, int | None]]] = {}
    for x in module.instructions.values():
        for name, element in x.reads:
            taken = x.number if x.opcode == "get-tuple-element" else element
            users.setdefault(name, []).append((x, taken))

    def read(name: str, element: int | None) -> list[Instruction]:
        found = []
        for x, taken in users.get(name, ()):
            if None in (element, taken) or element == taken:
                passes = x.opcode in ("get-tuple-element", "bitcast")
                found += read(x.name, None) if passes else [x]
        return found

    return read


def summed(module: Module) -> set[tuple[str, int]]:
    """Returns the values that are summed over devices, possibly after casts.

    Values that a loop carries are followed through its trips, and those that a
    conditional takes through its branches.
    """
    loops = [x for x in module.instructions.values() if x.opcode == "while"]
    carried_by = {y.name: x for x in loops for y in module.body(x).parameters.values()}

    given_to = {
        y.name: operand
        for x in module.instructions.values()
        for body, operand in zip(_branches(module, x), x.operands[1:], strict=False)
        for y in body.parameters.values()
    }

    def sources(name: str, element: int) -> list[tuple[str, int]]:
        """Lists the values that it copies, up to dtype and layout."""
        x = module.instructions[name]
        read = [(operand, of or 0) for operand, of in x.reads]
        if x.opcode == "get-tuple-element":
            return [(x.operands[0], x.number)]
        if x.opcode == "tuple":
            return [read[element]]
        if x.opcode in _SAME:
            return [(x.operands[0], element)] if len(x.arrays) > 1 else read[:1]
        called = _called(module, x)
        if x.opcode == "while" and called:
            return [(x.operands[0], element), (called.root.name, element)]
        if branches := _branches(module, x):
            return [(branch.root.name, element) for branch in branches]
        if name in given_to:
            return [(given_to[name], element)]
        if name in carried_by:
            return [(carried_by[name].name, element)]
        inside = {y.opcode for y in called.instructions} if called else set()
        if not inside or "dot" in inside or not x.source.endswith(_CASTS):
            return []
        size = x.arrays[element].size
        return [v for v in read if module.instructions[v[0]].arrays[v[1]].size == size]

    found: set[tuple[str, int]] = set()
    left = [
        (name, element or 0)
        for x in module.instructions.values()
        if x.source.rpartition("/")[2] in _SUMS and x.opcode != "fusion"
        if not x.opcode.endswith("done") and x.opcode != "get-tuple-element"
        for name, element in x.reads
    ]
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += sources(*value)
    return found
