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

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\) -> .*\{$")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\]")
_INSTRUCTION = re.compile(
    r"(?:ROOT )?%?(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array: ``f32[4,16]``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            assert digits, f"unknown dtype {self.dtype}"
            bits = int(digits[1])
        return self.size * bits // 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: one of ``KINDS``; the start of an asynchronous one counts as the whole.
      operands: what each device puts in.
      results: what each device gets.
      group: number of devices that take part together.
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
        """Bytes that a device sends, in all runs, by a ring."""
        put, got = (sum(a.bytes for a in s) for s in (self.operands, self.results))
        whole = {"all-gather": got, "all-reduce": 2 * put, "collective-permute": put}
        if self.kind == "collective-permute":
            return self.times * put
        return self.times * whole.get(self.kind, put) * (self.group - 1) // self.group


def collectives(text: str) -> list[Collective]:
    """The collectives between two devices or more that a program runs.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    computations, entry = _computations(text)
    found = re.search(r"num_partitions=(\d+)", text)
    devices = int(found[1]) if found else 1
    return [
        c
        for c in _walk(computations, entry, 1, devices)
        if c.group > 1
    ]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Instructions by computation, and the entry's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, None
    for raw in text.splitlines():
        header = _COMPUTATION.match(raw)
        if header:
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif raw.startswith("}"):
            lines = None
        elif lines is not None and _INSTRUCTION.match(raw.strip()):
            lines.append(raw.strip())
    if entry is None:
        raise ValueError("no ENTRY computation: is this HLO text?")
    return computations, entry


def _walk(
    computations: dict[str, list[str]], name: str, times: int, devices: int
) -> Iterator[Collective]:
    shapes: dict[str, tuple[Array, ...]] = {}
    for line in computations[name]:
        instruction = _INSTRUCTION.match(line)
        assert instruction
        opcode = instruction["opcode"]
        shapes[instruction["name"]] = results = _arrays(instruction["shape"])
        rest = line[instruction.end() :]
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            operands = tuple(
                array
                for operand in re.findall(r"%([^\s,()]+)", _closed(rest))
                for array in shapes[operand]
            )
            if opcode.endswith("-start") and len(results) >= 2 * len(operands):
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
                inside = _walk(computations, inner, times * (trips or 1), devices)
                first = next(inside, None)
                if first is None:
                    continue
                if trips is None:
                    raise ValueError(
                        f"{first.kind} in a loop without a known trip count: {line}"
                    )
                yield from itertools.chain([first], inside)


def _closed(rest: str) -> str:
    """What stands before the parenthesis that closes an operand list."""
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:i]
    raise ValueError(f"no closing parenthesis in {rest}")


def _arrays(shape: str) -> tuple[Array, ...]:
    return tuple(
        Array(a["dtype"], tuple(int(d.strip("<=")) for d in a["dims"].split(",") if d))
        for a in _ARRAY.finditer(shape)
    )


def _group_size(attributes: str, devices: int) -> int:
    if "source_target_pairs=" in attributes:
        moved = re.findall(r"\{(\d+),(\d+)\}", attributes.split("source_target_pairs=")[1])
        return 2 if any(a != b for a, b in moved) else 1
    # Lists, {{0,1},{2,3}}; iota tiles, [groups,size]<=[8]; mesh axes,
    # mesh['a'=2,'b'=4] {'b'}; nothing, which is all devices.
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'([^']+)'", found[2]))
    return devices
