"""Reads optimized HLO text: which collectives run, how often, and what they carry.

``collectives(compiled.as_text())`` walks the program from its entry. The body of a
while loop counts times the trip count that XLA found, nested loops multiply, and calls
are followed; of a conditional, which runs one branch, every branch counts.
"""

import dataclasses
import itertools
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


def compile(lowered: jax.stages.Lowered, **options: Any) -> Any:
    """Compiles, and keeps optimization barriers until instructions are scheduled.

    XLA:GPU does, and XLA:CPU since JAX 0.12. Before, XLA:CPU drops them early, merges
    what they kept apart, and runs what they held back. (Its emitter of small loops
    cannot pass a barrier, so that these stay loops.)
    """
    passes = "cse_barrier_expander,small-while-loop-hoisting"
    keep = {"xla_disable_hlo_passes": passes} if jax.__version_info__ < (0, 12) else {}
    return lowered.compile(compiler_options=keep | options)


def collectives(text: str) -> list[Collective]:
    """The collectives between two devices or more that a program runs.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    computations, entry = _computations(text)
    found = re.search(r"num_partitions=(\d+)", text)
    devices = int(found[1]) if found else 1
    return [c for c in _walk(computations, entry, 1, devices) if c.group > 1]


def matrix_flops(text: str) -> int:
    """FLOPs of the matrix products that a program runs.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    computations, entry = _computations(text)

    def of(name: str) -> int:
        types: dict[str, tuple[Array, ...]] = {}
        total = 0
        for line in computations[name]:
            instruction = _INSTRUCTION.match(line)
            assert instruction
            results = types[instruction["name"]] = _arrays(instruction["shape"])
            rest = line[instruction.end() :]
            if instruction["opcode"] == "dot":
                (left,) = types[re.findall(r"%([^\s,()]+)", _operand_list(rest))[0]]
                summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
                dims = map(int, summed[1].split(",")) if summed else ()
                total += 2 * results[0].size * math.prod(left.shape[d] for d in dims)
            for role, called in _CALLED.findall(rest):
                inner = sum(map(of, re.findall(r"[\w.\-]+", called)))
                if inner and role == "body":
                    known = _TRIPS.search(rest)
                    if not known:
                        raise ValueError(
                            f"product in a loop with no trip count: {line}"
                        )
                    inner *= int(known[1])
                total += inner
        return total

    return of(entry)


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
    computations: dict[str, list[str]], name: str, times: int, devices: int
) -> Iterator[Collective]:
    types: dict[str, tuple[Array, ...]] = {}
    for line in computations[name]:
        instruction = _INSTRUCTION.match(line)
        assert instruction
        results = types[instruction["name"]] = _arrays(instruction["shape"])
        rest = line[instruction.end() :]
        kind = instruction["opcode"].removesuffix("-start")
        if kind in KINDS:
            names = re.findall(r"%([^\s,()]+)", _operand_list(rest))
            operands = tuple(array for name in names for array in types[name])
            if instruction["opcode"] != kind and len(results) > len(operands):
                # An asynchronous start returns (operands, results, context).
                results = results[len(operands) : 2 * len(operands)]
            source = re.search(r'op_name="([^"]*)"', rest)
            group = _group_size(rest, devices)
            yield Collective(
                kind, operands, results, group, times, source[1] if source else ""
            )
        for role, called in _CALLED.findall(rest):
            trips = 1
            if role in ("body", "condition"):
                known = _TRIPS.search(rest)
                # A condition runs once more than its body.
                trips = int(known[1]) + (role == "condition") if known else None
            for inner in re.findall(r"[\w.\-]+", called):
                found = _walk(computations, inner, times * (trips or 1), devices)
                for first in itertools.islice(found, 1):
                    if trips is None:
                        raise ValueError(
                            f"{first.kind} in a loop with no known trip count: {line}"
                        )
                    yield first
                yield from found


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


def _group_size(attributes: str, devices: int) -> int:
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
