"""Reads a scheduled program: XLA's optimized HLO text as computations of instructions.

XLA prints a compiled module in the order in which it runs. Only what planning needs is
kept: opcodes, shapes, operands, and the attributes by name.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

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
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(
    r"\b(?P<role>body|condition|to_apply|calls|called_computations|"
    r"branch_computations|true_computation|false_computation)="
    r"(?P<names>\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
HOST_SPACE = 5  # XLA's memory space of pinned host memory


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array, as in ``f32[4,16]``; ``space`` 5 is host memory."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """In memory; a pred is a byte, a token nothing."""
        if self.dtype == "token":
            return 0
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return -(-self.size * (int(bits[1]) if bits else 8) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its module.
      opcode: as in ``all-gather-start``.
      arrays: of the result, a tuple's flattened.
      operands: names of instructions in the same computation.
      text: the attributes, after the operands.
      is_root: whether it is its computation's result.
      literal: what stands in the parentheses.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool
    literal: str

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations it calls, by role (``body``, ``calls``, ...)."""
        return {
            match["role"]: tuple(
                name.strip(" %") for name in match["names"].strip("{}").split(",")
            )
            for match in _CALLED.finditer(self.text)
        }

    @property
    def trips(self) -> int | None:
        """How often a while loop runs, as XLA found; None where it does not know."""
        found = _TRIPS.search(self.text)
        return int(found[1]) if found else None

    @property
    def source(self) -> str:
        """The JAX operation it comes from, as ``jit(step)/jvp()/while/body/dot``."""
        found = _OP_NAME.search(self.text)
        return found[1] if found else ""

    @functools.cached_property
    def reads(self) -> tuple[tuple[str, int | None], ...]:
        """Its operands, and which element of a tuple each is, or None.

        Dumps of JAX 0.12 write elements so, and no get-tuple-element.
        """
        return tuple(
            (m[1], int(m[2]) if m[2] else None)
            for m in _REFERENCE.finditer(self.literal)
        )

    @property
    def number(self) -> int:
        """Of a parameter, or the element that a get-tuple-element takes."""
        if self.opcode == "parameter":
            return int(self.literal)
        found = _INDEX.search(self.text)
        return int(found[1]) if found else 0

    @property
    def target(self) -> str:
        """Of a custom call: whose."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    def attribute(self, name: str) -> tuple[int, ...]:
        """A list of numbers, as in ``dimensions={0,1}``; () where there is none."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.text)
        return _numbers(found[1]) if found else ()

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Device numbers of a collective's groups; () is all devices as one."""
        listed = _LISTED_GROUPS.search(self.text)
        if listed:
            rows = re.findall(r"\{([\d,]*)\}", listed[1])
            return tuple(_numbers(row) for row in rows)
        mesh = _MESH_GROUPS.search(self.text)
        if mesh:
            return _groups_of_mesh(mesh[1], mesh[2])
        iota = _IOTA_GROUPS.search(self.text)
        if not iota:
            return ()
        # [groups, size] <= [dims]T(order): a transposed and reshaped arange.
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else tuple(range(len(dims)))
        return _transposed_groups(dims, order, shape[-1])


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names."""
        return {x.name: x for x in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The result."""
        return next(x for x in self.instructions if x.is_root)

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read each instruction."""
        users: dict[str, list[Instruction]] = {x.name: [] for x in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return {name: tuple(found) for name, found in users.items()}

    def parameter(self, number: int) -> Instruction:
        """The instruction that stands for an argument."""
        wanted = str(number)
        return next(
            x
            for x in self.instructions
            if x.opcode == "parameter" and x.literal == wanted
        )


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: where it begins.
    """

    computations: dict[str, Computation]
    entry: Computation

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All of them; a name is unique in its module."""
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
    """Reads what ``compiled.as_text()`` gives.

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
        else:
            instruction = _instruction(line)
            if instruction:
                instructions.append(instruction)
    if entry is None:
        raise ValueError("this is not the text of a compiled program")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction | None:
    line = _COMMENT.sub("", line)
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    end = _closing(line, match.end())
    operands = line[match.end() : end]
    return Instruction(
        name=match["name"],
        opcode=match["opcode"],
        arrays=arrays(match["shape"]),
        operands=tuple(m[1] for m in _REFERENCE.finditer(operands)),
        text=line[end + 1 :],
        is_root=bool(match["root"]),
        literal=operands,
    )


def _groups_of_mesh(axes: str, chosen: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes, as in ``mesh['replica'=2,'fsdp'=4] {'fsdp'}``.

    Raises:
      ValueError: a part of an axis is chosen, which jshard's meshes never need.
    """
    sizes = {
        name.strip("' "): int(size)
        for name, _, size in (axis.partition("=") for axis in axes.split(","))
    }
    along = [name.strip("' ") for name in chosen.split(",") if name.strip()]
    if not set(along) <= set(sizes):
        raise ValueError(f"device groups along {chosen} of a mesh {axes}")
    names = list(sizes)
    others = [name for name in names if name not in along]
    order = tuple(names.index(name) for name in (*others, *along))
    size = math.prod(sizes[name] for name in along)
    return _transposed_groups(tuple(sizes.values()), order, size)


def _transposed_groups(
    dims: tuple[int, ...], order: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], ...]:
    """An arange of shape ``dims``, transposed, in rows of ``size``."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for axis in order:
        flat = [x + i * strides[axis] for x in flat for i in range(dims[axis])]
    return tuple(
        tuple(flat[start : start + size]) for start in range(0, len(flat), size)
    )


def _closing(line: str, start: int) -> int:
    """Where the parenthesis opened before ``start`` closes."""
    depth = 1
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


@functools.lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed type, a tuple's in order, nested ones flattened."""
    return tuple(
        Array(m["dtype"], _numbers(m["dims"]), int(m["space"] or 0))
        for m in _ARRAY.finditer(shape)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x.strip("<=")) for x in text.split(",") if x.strip("<="))
