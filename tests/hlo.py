"""Reads optimized HLO text: which collectives, products and copies run.

``collectives(compiled.as_text())`` and its like walk the program from its entry.
The body of a while loop counts times the trip count that XLA found, nested loops
multiply, and calls are followed; of a conditional, which runs one branch, every branch
counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
    r"(?:ROOT )?%?(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array, as in ``f32[4,16]``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return self.size * (int(bits[1]) if bits else 8) // 8  # pred is a byte


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: one of ``KINDS``; the start of an asynchronous one counts as the whole.
      operands: what a device puts in.
      results: what a device gets.
      group: how many devices take part together.
      times: how often it runs in one call of the program.
      source: the JAX operation it comes from.
    """

    kind: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    group: int
    times: int
    source: str

    @property
    def result_bytes(self) -> int:
        """Bytes that one run leaves on a device."""
        return sum(array.bytes for array in self.results)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in all runs, by a ring."""
        operand_bytes = sum(array.bytes for array in self.operands)
        if self.kind == "collective-permute":
            return self.times * operand_bytes
        whole = {"all-gather": self.result_bytes, "all-reduce": 2 * operand_bytes}
        moved = whole.get(self.kind, operand_bytes)
        return self.times * moved * (self.group - 1) // self.group


@dataclasses.dataclass(frozen=True)
class Dot:
    """One product of arrays.

    Attributes:
      operands: the two factors.
      result: the product.
      contracted: how many terms each of its elements adds up.
      times: how often it runs in one call of the program.
    """

    operands: tuple[Array, ...]
    result: Array
    contracted: int
    times: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of all runs."""
        return self.times * 2 * self.result.size * self.contracted


def compile(lowered: jax.stages.Lowered, **options: Any) -> Any:
    """Compiles to be read, not to run: LLVM does as little as it can.

    Optimization barriers stay until instructions are scheduled. XLA:GPU keeps them so
    long, and XLA:CPU since JAX 0.12. Before, XLA:CPU drops them early, merges what they
    kept apart, and runs what they held back. (Its emitter of small loops cannot pass a
    barrier, so that these stay loops.)
    """
    quick = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    passes = "cse_barrier_expander,small-while-loop-hoisting"
    keep = {"xla_disable_hlo_passes": passes} if jax.__version_info__ < (0, 12) else {}
    return lowered.compile(compiler_options=quick | keep | options)


def collectives(text: str) -> list[Collective]:
    """The collectives between two devices or more that a program runs.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    found = re.search(r"num_partitions=(\d+)", text)
    devices = int(found[1]) if found else 1
    return [
        _collective(x, devices)
        for x in _instructions(text)
        if x.opcode.removesuffix("-start") in KINDS and _group_size(x, devices) > 1
    ]


def dots(text: str) -> list[Dot]:
    """The products of arrays that a program computes.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    return [_dot(x) for x in _instructions(text) if x.opcode == "dot"]


def copies(text: str) -> list[tuple[Array, int]]:
    """What a program copies, and how often.

    Raises:
      ValueError: a loop that holds a copy has no known trip count.
    """
    found = [x for x in _instructions(text) if x.opcode in ("copy", "copy-start")]
    return [(x.results[0], x.times) for x in found]


def aliased(text: str) -> set[int]:
    """The numbers of the parameters whose memory an output takes over."""
    header = text[: text.index("\n")]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    entries = re.findall(r"\{[\d, ]*\}: \((\d+), \{\}", found[1] if found else "")
    return set(map(int, entries))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """A line of a computation, and what stands above it."""

    opcode: str
    results: tuple[Array, ...]
    rest: str  # operands and attributes
    types: dict[str, tuple[Array, ...]]
    trips: int | None

    @property
    def operands(self) -> tuple[Array, ...]:
        names = re.findall(r"%([^\s,()]+)", _operand_list(self.rest))
        return tuple(array for name in names for array in self.types[name])

    @property
    def times(self) -> int:
        if self.trips is None:
            raise ValueError(
                f"{self.opcode} in a loop with no known trip count: {self.rest}"
            )
        return self.trips


def _collective(x: _Instruction, devices: int) -> Collective:
    kind, results = x.opcode.removesuffix("-start"), x.results
    if x.opcode != kind and len(results) > len(x.operands):
        # An asynchronous start returns (operands, results, context).
        results = results[len(x.operands) : 2 * len(x.operands)]
    source = re.search(r'op_name="([^"]*)"', x.rest)
    group = _group_size(x, devices)
    name = source[1] if source else ""
    return Collective(kind, x.operands, results, group, x.times, name)


def _dot(x: _Instruction) -> Dot:
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
    assert dims
    contracted = [x.operands[0].shape[int(d)] for d in dims[1].split(",") if d]
    return Dot(x.operands, x.results[0], math.prod(contracted), x.times)


def _instructions(text: str) -> Iterator[_Instruction]:
    computations, entry = _computations(text)
    return _walk(computations, entry, 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of every computation, and the entry's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, None
    for line in map(str.strip, text.splitlines()):
        header = _COMPUTATION.match(line)
        if header:
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line == "}":
            lines = None
        elif lines is not None and _INSTRUCTION.match(line):
            lines.append(line)
    if entry is None:
        raise ValueError("no ENTRY computation: this is no HLO text")
    return computations, entry


def _walk(
    computations: dict[str, list[str]], name: str, times: int | None
) -> Iterator[_Instruction]:
    types: dict[str, tuple[Array, ...]] = {}
    for line in computations[name]:
        found = _INSTRUCTION.match(line)
        assert found
        results = types[found["name"]] = _arrays(found["shape"])
        rest = line[found.end() :]
        yield _Instruction(found["opcode"], results, rest, types, times)
        for role, called in _CALLED.findall(rest):
            inner_times = times
            if role in ("body", "condition"):
                known = _TRIPS.search(rest)
                # A condition runs once more than its body.
                trips = int(known[1]) + (role == "condition") if known else None
                inner_times = times and trips and times * trips
            for inner in re.findall(r"[\w.\-]+", called):
                yield from _walk(computations, inner, inner_times)


def _operand_list(rest: str) -> str:
    """What stands before the parenthesis that closes an operand list."""
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:i]
    raise ValueError(f"no closing parenthesis in {rest}")


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(a["dtype"], tuple(int(d.strip("<=")) for d in a["dims"].split(",") if d))
        for a in _ARRAY.finditer(text)
    )


def _group_size(x: _Instruction, devices: int) -> int:
    attributes = x.rest
    if "source_target_pairs=" in attributes:
        pairs = re.findall(r"\{(\d+),(\d+)\}", attributes)
        return 2 if any(a != b for a, b in pairs) else 1
    # Lists: {{0,1},{2,3}}; tiles: [groups,size]<=[8]; axes: mesh['a'=2,'b'=4] {'b'}.
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'([^']+)'", found[2]))
    return devices  # none are named: all
