"""Parses a scheduled program: XLA's optimized HLO text.

XLA prints the instructions of a compiled module in the order in which they run. The
parser keeps what the planner needs: opcodes, shapes, operands and attributes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jshard.plan.hlo.device_groups import groups_of, numbers
from jshard.sharding.settings.scopes import FURTHER_ROUNDS, SCHEDULE, UPDATE

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][\w\-]*)\("
)
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(
    r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{[^}]*?(?:S\((?P<space>\d+)\))?\})?"
)
_REFERENCE = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_PARENTHESIS = re.compile(r"[()]")
_CALLED = re.compile(
    r"\b(?P<role>body|condition|to_apply|calls|called_computations|"
    r"branch_computations|true_computation|false_computation)="
    r"(?P<names>\{[^}]*\}|%?[\w.\-]+)"
)
_OF_TICK = re.compile(SCHEDULE.format(*[r"\d+"] * 3) + r"/cond/branch_(\d+)_fun")
HOST_SPACE = 5  # pinned host memory

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class Array(NamedTuple):
    """The type of an array, such as ``f32[4,16]``, and its memory space."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in memory. A pred takes one byte, a token none."""
        if self.dtype == "token":
            return 0
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-self.size * (int(bits[1]) if bits else 8) // 8)

    @property
    def on_host(self) -> bool:
        """Whether it is in pinned host memory."""
        return self.space == HOST_SPACE


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # unique in its module
    opcode: str  # such as `all-gather-start`
    arrays: tuple[Array, ...]  # the result; tuples are flattened
    literal: str  # the text in the parentheses, usually the operands
    text: str  # the attributes, after the parentheses
    is_root: bool  # whether it is its computation's result

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """Operands, each with the tuple element that it reads, or None.

        Dumps of JAX 0.12 write elements this way, without a get-tuple-element.
        """
        found = _REFERENCE.findall(self.literal)
        return tuple(
            (name, int(element) if element else None) for name, element in found
        )

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, instructions of the same computation."""
        return tuple(name for name, _ in self.reads)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it calls, by role (``body``, ``calls``, ...)."""
        return {
            role: tuple(name.strip(" %") for name in names.strip("{}").split(","))
            for role, names in _CALLED.findall(self.text)
        }

    @property
    def trips(self) -> int | None:
        """Trip count of a while loop, or None if XLA does not know it."""
        found = self._find(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(found) if found else None

    @property
    def further_rounds(self) -> tuple[float, float] | None:
        """The (begin, step) of a loop over further rounds, in even shares."""
        form = rf"{FURTHER_ROUNDS} from ([\d.]+) by ([\d.]+)"
        loops = self.opcode == "while" and self.trips is None  # known within a round
        found = re.search(form, self.source) if loops else None
        return (float(found[1]), float(found[2])) if found else None

    @property
    def source(self) -> str:
        """The JAX operation it comes from: ``jit(step)/jvp()/while/body/dot``."""
        return self._find(r'op_name="([^"]*)"')

    @property
    def number(self) -> int:
        """Position of a parameter, or the element a get-tuple-element reads."""
        if self.opcode == "parameter":
            return int(self.literal)
        return int(self._find(r"\bindex=(\d+)") or 0)

    @property
    def target(self) -> str:
        """Target of a custom call."""
        return self._find(r'custom_call_target="([^"]*)"')

    def attribute(self, name: str) -> tuple[int, ...]:
        """A list of numbers such as ``dimensions={0,1}``; () if it is absent."""
        return numbers(self._find(rf"\b{name}=\{{([\d,]*)\}}"))

    def _find(self, pattern: str) -> str:
        """The first group of a pattern's first match in the attributes, or ""."""
        found = re.search(pattern, self.text)
        return found[1] if found else ""

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Device numbers of a collective's groups, or pairs; () is one group of all.

        Raises:
          ValueError: the groups are written in a way that is not known.
        """
        return groups_of(self.name, self.text)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {x.name: x for x in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The result."""
        return next(x for x in self.instructions if x.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by position."""
        return {x.number: x for x in self.instructions if x.opcode == "parameter"}

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read an instruction."""
        return [x for x in self.instructions if name in x.operands]

    def given(self, x: Instruction) -> list[Array]:
        """The arrays that an instruction takes."""
        return [array for name in x.operands for array in self.by_name[name].arrays]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and where it starts.

    ``imbalance`` is the most tokens that a device sends to one expert, as a multiple of
    an even share.
    """

    computations: dict[str, Computation]
    entry: Computation
    imbalance: float = 1.0

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs; once if nobody knows."""
        if rounds := loop.further_rounds:
            begin, step = rounds
            return max(0, math.ceil((self.imbalance - begin) / step - 1e-9))
        return 1 if loop.trips is None else loop.trips

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name."""
        found = self.computations.values()
        return {x.name: x for body in found for x in body.instructions}

    def body(self, instruction: Instruction, role: str = "body") -> Computation:
        """The computation that an instruction calls in a role."""
        return self.computations[instruction.called[role][0]]

    def inside(self, instruction: Instruction) -> Iterator[Computation]:
        """All computations that an instruction calls."""
        for names in instruction.called.values():
            for name in names:
                if name in self.computations:
                    yield self.computations[name]


def parse(text: str) -> Module:
    """Parses the output of ``compiled.as_text()``.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = None
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if name is None:
            header = _HEADER.match(line) if line.endswith("{") else None
            if header:
                name, instructions = header["name"], []
                entry = name if header["entry"] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
            name = None
        elif instruction := _instruction(line):
            instructions.append(instruction)
    if entry is None:
        raise ValueError("this is not the text of a compiled program")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction | None:
    line = _COMMENT.sub("", line)
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start, end = match.end(), _closing(line, match.end())
    literal, text, is_root = line[start:end], line[end + 1 :], bool(match["root"])
    result = arrays(match["shape"])
    return Instruction(match["name"], match["opcode"], result, literal, text, is_root)


def _closing(line: str, start: int) -> int:
    """The position where the parenthesis opened just before ``start`` closes."""
    depth = 1
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed type, with tuples flattened."""
    return tuple(
        Array(m["dtype"], numbers(m["dims"]), int(m["space"] or 0))
        for m in _ARRAY.finditer(shape)
    )


def direction(source: str) -> str:
    """The part of a step that a JAX operation belongs to.

    Its name holds the transformations around it: ``jvp`` marks the forward,
    ``transpose`` the backward; in the ticks of a pipeline branches do. What is in the
    scope of the update or outside ``shard_map`` is the update, the rest the step.
    """
    if "transpose(" in source:
        return BACKWARD
    if "jvp(" in source:
        return FORWARD
    if tick := _OF_TICK.search(source):
        return FORWARD if tick[1] == "1" else BACKWARD
    if UPDATE in source.split("/"):
        return UPDATE
    return STEP if "shard_map" in source or not source else UPDATE
