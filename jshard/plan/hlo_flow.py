"""Compiled HLO as text: what each value depends on, and which values are summed up."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(body|calls|to_apply)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_INDEX = re.compile(r"\bindex=(\d+)")
# They hand on what they are given, element by element or as it is.
_SAME = {"bitcast", "copy", "convert", "transpose", "reshape", "opt-barrier"}
_SAME |= {"copy-start", "copy-done", "async-done", "async-update"}
_SUMS = ("reduce_scatter", "psum", "psum_invariant", "all_to_all")
_CASTS = ("convert_element_type", "transpose", "mul", "div")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in its program.
      computation: that it is in.
      opcode: of HLO.
      shape: as text.
      operands: what it reads: a name, and which element of a tuple (JAX 0.12 writes
        that, and no get-tuple-element) or None.
      called: the computation that it runs, the loop's body for a while.
      op_name: the JAX operations that it comes from.
      number: of a parameter, or the element that a get-tuple-element takes.
    """

    name: str
    computation: str
    opcode: str
    shape: str
    operands: tuple[tuple[str, int | None], ...]
    called: str | None
    op_name: str
    number: int

    @property
    def elements(self) -> int:
        """How many values its result has, as a tuple."""
        return len(_split(self.shape)) if self.shape.startswith("(") else 1


@dataclasses.dataclass(frozen=True)
class Program:
    """A module's instructions by name, and its computations as lists of those."""

    instructions: Mapping[str, Instruction]
    computations: Mapping[str, Sequence[Instruction]]
    roots: Mapping[str, Instruction]
    entry: str

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """The instruction that runs a computation (the last, where there are more)."""
        found = self.instructions.values()
        return {inst.called: inst for inst in found if inst.called}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int | None]]]:
        """Who reads a name, and which element of it (None where it reads all)."""
        found: dict[str, list[tuple[Instruction, int | None]]] = {}
        for inst in self.instructions.values():
            for name, element in inst.operands:
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
    computations: dict[str, list[Instruction]] = {}
    roots, entry, here = {}, "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            here = head[2]
            entry = here if head[1] else entry
            computations[here] = []
        elif here and (match := _INSTRUCTION.match(line)):
            found = _instruction(match[2], here, line[match.end() :])
            computations[here].append(found)
            if match[1]:
                roots[here] = found
    by_name = {i.name: i for found in computations.values() for i in found}
    return Program(by_name, computations, roots, entry)


def _instruction(name: str, computation: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    start = text.index("(")
    opcode, end = text[:start], _closing(text, start)
    inside, rest = text[start + 1 : end - 1], text[end:]
    called, op_name = _CALLED.search(rest), _OP_NAME.search(rest)
    index = _INDEX.search(rest)
    number = int(inside) if opcode == "parameter" else int(index[1]) if index else 0
    return Instruction(
        name,
        computation,
        opcode,
        re.sub(r"/\*.*?\*/", "", shape),
        tuple((m[1], int(m[2]) if m[2] else None) for m in _OPERAND.finditer(inside)),
        called and called[2],
        op_name[1] if op_name else "",
        number,
    )


def _closing(text: str, start: int) -> int:
    """The end of what the parenthesis at ``start`` opens."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")


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
        for inst in program.computations[computation]:
            if inst.opcode == "parameter":
                bits = list(given[inst.number])
            else:
                bits = evaluate(
                    inst,
                    [
                        found[name] if element is None else [found[name][element]]
                        for name, element in inst.operands
                    ],
                )
            found[inst.name] = bits
        return found[program.roots[computation].name]

    def evaluate(inst: Instruction, given: list[list[int]]) -> list[int]:
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
                out = run(inst.called or "", [carry])
                merged = [a | b for a, b in zip(carry, out, strict=True)]
                if merged == carry:
                    return carry
                carry = merged
        if inst.opcode in ("fusion", "call") and inst.called:
            return run(inst.called, given)
        if inst.opcode == "async-start" and inst.called:
            run(inst.called, given)  # (its values may have the buffers)
        if inst.opcode in _SAME and len(given) == 1:
            same = len(given[0]) == inst.elements
            return given[0] if same else [together] * inst.elements
        return [together] * inst.elements

    entry = program.computations[program.entry]
    parameters = sorted(
        (inst for inst in entry if inst.opcode == "parameter"),
        key=lambda inst: inst.number,
    )
    run(program.entry, [[inputs.get(inst.name, 0)] for inst in parameters])
    return found


def summed(program: Program) -> set[tuple[str, int]]:
    """Values, as (instruction, element), that are summed over devices as they are.

    Casts in between, and loops that carry them, are followed.
    """
    found: set[tuple[str, int]] = set()
    todo = [
        (name, element or 0)
        for inst in program.instructions.values()
        if inst.op_name.rpartition("/")[2] in _SUMS and inst.opcode != "fusion"
        if not inst.opcode.endswith("done") and inst.opcode != "get-tuple-element"
        for name, element in inst.operands
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
    read = [(name, found or 0) for name, found in inst.operands]
    if inst.opcode == "get-tuple-element":
        return [(read[0][0], inst.number)]
    if inst.opcode == "tuple":
        return [read[element]]
    if inst.opcode in _SAME:
        return [(read[0][0], element)] if inst.elements > 1 else [read[0]]
    if inst.opcode == "while":
        body = program.roots[inst.called or ""].name
        return [(read[0][0], element), (body, element)]
    if inst.opcode == "parameter":
        caller = program.callers.get(inst.computation)
        if caller is None or caller.opcode != "while":
            return []
        return [(caller.name, element)]
    inside = {i.opcode for i in program.computations.get(inst.called or "", ())}
    if inst.op_name.endswith(_CASTS) and inside and "dot" not in inside:
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
