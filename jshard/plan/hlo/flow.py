"""Compiled HLO as text: what each value depends on, and which values are summed up."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jshard.plan.hlo import hlo
from jshard.plan.hlo.hlo import Instruction

# They hand on what they are given, element by element or as it is.
_SAME = {"bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier"}
_SAME |= {"copy-start", "copy-done", "async-done", "async-update"}
_SUMS = ("reduce_scatter", "psum", "psum_invariant", "all_to_all")
_CASTS = ("convert_element_type", "transpose", "mul", "div")


@dataclasses.dataclass(frozen=True)
class Program:
    """A module's instructions by name, across its computations.

    Attributes:
      module: as ``jshard.plan.hlo.hlo.parse`` reads it.
    """

    module: hlo.Module

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """By name, unique in a module."""
        found = self.module.computations.values()
        return {inst.name: inst for body in found for inst in body.instructions}

    @functools.cached_property
    def homes(self) -> dict[str, str]:
        """The computation that each instruction is in."""
        found = self.module.computations.values()
        return {inst.name: body.name for body in found for inst in body.instructions}

    def runs(self, inst: Instruction) -> str | None:
        """The computation that an instruction runs, the loop's body for a while."""
        for role in ("body", "calls", "to_apply"):
            if role in inst.called:
                return inst.called[role][0]
        return None

    def root(self, computation: str) -> Instruction:
        """The result of a computation."""
        return self.module.computations[computation].root

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that runs a computation (the last, where there are more)."""
        found = self.instructions.values()
        return {name: inst for inst in found if (name := self.runs(inst))}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int | None]]]:
        """Who reads a name, and which element of it (None where it reads all)."""
        found: dict[str, list[tuple[Instruction, int | None]]] = {}
        for inst in self.instructions.values():
            for name, element in inst.reads:
                if inst.opcode == "get-tuple-element":
                    element = inst.number
                found.setdefault(name, []).append((inst, element))
        return found

    def readers(self, name: str, element: int | None) -> list[Instruction]:
        """The instructions that compute with a value, or with an element of it."""
        found = []
        for inst, of in self.users.get(name, ()):
            if None in (element, of) or element == of:
                if inst.opcode in ("get-tuple-element", "bitcast"):
                    found += self.readers(inst.name, None)
                else:
                    found.append(inst)
        return found


def parse(text: str) -> Program:
    """Reads a module, e.g. ``compiled.as_text()``."""
    return Program(hlo.parse(text))


def count(inst: Instruction) -> int:
    """How many values an instruction's result has, as a tuple."""
    return len(_split(inst.shape)) if inst.shape.startswith("(") else 1


def _split(shape: str) -> list[str]:
    """The elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for i, char in enumerate(shape):
        depth += {"(": 1, ")": -1, "[": 1, "]": -1, "{": 1, "}": -1}.get(char, 0)
        if (char == "," and depth == 1) or not depth:
            parts.append(shape[start:i])
            start = i + 1
    return [part for part in parts if part.strip()]


def elements(shape: str) -> int:
    """How many numbers an array's shape as text has, "f32[2,3]{1,0}" six."""
    inside = shape[shape.find("[") + 1 : shape.find("]")]
    sizes = [int(size) for size in inside.split(",") if size]
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def dependencies(program: Program, inputs: Mapping[str, int]) -> dict[str, list[int]]:
    """What each value depends on, element by element, as the union of inputs' bits.

    Args:
      program: the module.
      inputs: bits of the entry's parameters, by name.
    """
    found: dict[str, list[int]] = {}

    def run(computation: str, given: Sequence[Sequence[int]]) -> list[int]:
        for inst in program.module.computations[computation].instructions:
            if inst.opcode == "parameter":
                bits = list(given[inst.number])
            else:
                bits = evaluate(
                    inst,
                    [
                        found[name] if element is None else [found[name][element]]
                        for name, element in inst.reads
                    ],
                )
            found[inst.name] = bits
        return found[program.root(computation).name]

    def evaluate(inst: Instruction, given: list[list[int]]) -> list[int]:
        called = program.runs(inst)
        together = functools.reduce(
            lambda a, b: a | b, [bit for bits in given for bit in bits], 0
        )
        if inst.opcode == "tuple":
            return [functools.reduce(lambda a, b: a | b, bits, 0) for bits in given]
        if inst.opcode == "get-tuple-element":
            return [given[0][inst.number] if inst.number < len(given[0]) else together]
        if inst.opcode == "while":
            carry = given[0]
            while True:
                out = run(called or "", [carry])
                merged = [a | b for a, b in zip(carry, out, strict=True)]
                if merged == carry:
                    return carry
                carry = merged
        if inst.opcode in ("fusion", "call") and called:
            return run(called, given)
        if inst.opcode == "async-start" and called:
            run(called, given)  # (its values may have the buffers)
        if inst.opcode in _SAME and len(given) == 1:
            same = len(given[0]) == count(inst)
            return given[0] if same else [together] * count(inst)
        return [together] * count(inst)

    entry = program.module.entry
    parameters = sorted(
        (inst for inst in entry.instructions if inst.opcode == "parameter"),
        key=lambda inst: inst.number,
    )
    run(entry.name, [[inputs.get(inst.name, 0)] for inst in parameters])
    return found


def summed(program: Program) -> set[tuple[str, int]]:
    """Values, as (instruction, element), that are summed over devices as they are.

    Casts in between, and loops that carry them, are followed.
    """
    found: set[tuple[str, int]] = set()
    todo = [
        (name, element or 0)
        for inst in program.instructions.values()
        if inst.source.rpartition("/")[2] in _SUMS and inst.opcode != "fusion"
        if not inst.opcode.endswith("done") and inst.opcode != "get-tuple-element"
        for name, element in inst.reads
    ]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += _sources(program, *here)
    return found


def _sources(program: Program, name: str, element: int) -> list[tuple[str, int]]:
    """Where a value comes from unchanged but for its dtype and its layout."""
    inst = program.instructions[name]
    read = [(name, found or 0) for name, found in inst.reads]
    if inst.opcode == "get-tuple-element":
        return [(read[0][0], inst.number)]
    if inst.opcode == "tuple":
        return [read[element]]
    if inst.opcode in _SAME:
        return [(read[0][0], element)] if count(inst) > 1 else [read[0]]
    if inst.opcode == "while":
        body = program.root(program.runs(inst) or "").name
        return [(read[0][0], element), (body, element)]
    if inst.opcode == "parameter":
        caller = program.callers.get(program.homes[inst.name])
        if caller is None or caller.opcode != "while":
            return []
        return [(caller.name, element)]
    called = program.module.computations.get(program.runs(inst) or "")
    inside = {i.opcode for i in called.instructions} if called else set()
    if inst.source.endswith(_CASTS) and inside and "dot" not in inside:
        size = elements(_element(inst.shape, element))
        return [
            (name, of)
            for name, of in read
            if elements(_element(program.instructions[name].shape, of)) == size
        ]
    return []


def _element(shape: str, element: int) -> str:
    """The shape of an element of a tuple, or that of an array."""
    return _split(shape)[element] if shape.startswith("(") else shape
