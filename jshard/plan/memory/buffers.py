"""The buffers of a compiled step at its fullest moment, as XLA assigned them.

XLA writes its buffer assignment, and when each value lives, to a folder
(``dump_options``). A moment's bytes are those of the slots that live values have; the
fullest moment is nearly all of the heap, and what it leaves unused is fragmentation.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jshard.plan.hlo import hlo
from jshard.plan.hlo.hlo import HOST_SPACE, Module

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_IN_SEQUENCE = re.compile(r"\s+(\d+):(\S+)$")

Place = tuple[int, int]  # offset and size of a part of the heap


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in a buffer.

    Attributes:
      name: of the instruction that makes it.
      index: which part of a tuple it is.
      shape: as text.
      start: when it is made, in the sequence of instructions.
      end: when it is read last.
    """

    name: str
    index: tuple[int, ...]
    shape: str
    start: int
    end: int

    @property
    def element(self) -> int | None:
        """Of its instruction's result; None where that is no tuple."""
        return self.index[0] if self.index else None

    @property
    def is_tuple(self) -> bool:
        """Whether it is a table of addresses."""
        return self.shape.startswith("(")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A part of the heap that is in use at the fullest moment.

    Attributes:
      nbytes: of it.
      values: that are there then.
      start: when the first value was made of those that handed it on to these.
      end: when the last is read of those that it is handed on to.
      history: all of these.
    """

    nbytes: int
    values: tuple[Value, ...]
    start: int
    end: int
    history: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What XLA's buffer assignment says.

    Attributes:
      arguments: bytes of each argument on the device, by its number.
      slots: of temporary memory, at the fullest moment.
      fragmentation: bytes of temporary memory that are not in use then.
      fullest: the instruction that runs then.
      sequence: the instructions in the order they run, loop bodies once.
      module: the program; its text elsewhere leaves out what runs beside others.
    """

    arguments: dict[int, int]
    slots: tuple[Slot, ...]
    fragmentation: int
    fullest: str
    sequence: tuple[str, ...]
    module: Module


def dump_options(folder: str | Path) -> dict[str, Any]:
    """Compiler options that make XLA write its buffer assignment to a folder."""
    return {"xla_dump_to": str(folder)}


def read(folder: str | Path) -> Assignment:
    """Reads what one compilation with ``dump_options`` wrote.

    Raises:
      ValueError: the folder has no buffer assignment, or several.
    """
    text = _only(folder, "*_after_optimizations-buffer-assignment.txt")
    sequence, ranges = _live(_only(folder, "*_after_optimizations-live-range.txt"))
    arguments, slots, fragmentation, most, moment = {}, [], 0, 0, 0
    for size, kind, values in _allocations(text, ranges):
        hosted = f"color {HOST_SPACE}" in kind
        number = re.search(r"\bparameter (\d+)", kind)
        if number and not hosted:
            arguments[int(number[1])] = size
        elif "preallocated-temp" in kind and not hosted:
            at, found = _fullest(values)
            used = sum(slot.nbytes for slot in found)
            slots += found
            fragmentation += size - used
            if used > most:
                most, moment = used, at
    fullest = sequence[moment] if moment < len(sequence) else ""
    module = hlo.parse(_only(folder, "*_after_optimizations.txt"))
    return Assignment(
        arguments, tuple(slots), fragmentation, fullest, tuple(sequence), module
    )


def _only(folder: str | Path, pattern: str) -> str:
    found = sorted(Path(folder).glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} files {pattern}, not one")
    return found[0].read_text()


def _live(text: str) -> tuple[list[str], dict[tuple, tuple[int, int]]]:
    """The sequence of instructions, and when each value lives."""
    sequence, ranges = [], {}
    for line in text.splitlines():
        if match := _RANGE.match(line):
            ranges[match[1], _index(match[2])] = int(match[3]), int(match[4])
        elif match := _IN_SEQUENCE.match(line):
            sequence.append(match[2])
        elif "Live ranges at" in line:
            break
    return sequence, ranges


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(",") if part)


def _allocations(
    text: str, ranges: dict[tuple, tuple[int, int]]
) -> Iterator[tuple[int, str, list[tuple[Value, int, int]]]]:
    """(size, kind, [(value, offset, size)]) of each allocation."""
    found: list[tuple[int, str, list]] = []
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            found.append((int(match[1]), match[2], []))
        elif match := _VALUE.match(line):
            name, index = match[1], _index(match[2])
            if live := ranges.get((name, index)):
                value = Value(name, index, match[6], *live)
                found[-1][2].append((value, int(match[5]), int(match[4])))
        elif not line.strip():
            break
    yield from ((s, k, v) for s, k, v in found)


def _fullest(values: list[tuple[Value, int, int]]) -> tuple[int, list[Slot]]:
    """When the most bytes are in use, and the slots that are then."""
    changes: dict[int, list[tuple[Place, int]]] = collections.defaultdict(list)
    at: dict[Place, list[Value]] = collections.defaultdict(list)
    for value, offset, size in values:
        at[offset, size].append(value)
        changes[value.start].append(((offset, size), 1))
        changes[value.end + 1].append(((offset, size), -1))
    users: collections.Counter[Place] = collections.Counter()
    most, moment = 0, 0
    for time in sorted(changes):
        for place, change in changes[time]:
            users[place] += change
        covered = sum(nbytes for _, nbytes in _covered(+users))
        if covered > most:
            most, moment = covered, time
    live = {
        place: here
        for place, found in at.items()
        if (here := [v for v in found if v.start <= moment <= v.end])
    }
    slots = []
    for place, nbytes in _covered(live):
        history = _history(at[place], live[place])
        start, end = min(v.start for v in history), max(v.end for v in history)
        slots.append(Slot(nbytes, tuple(live[place]), start, end, tuple(history)))
    return moment, slots


def _covered(places: Iterable[Place]) -> Iterator[tuple[Place, int]]:
    """The places, and bytes of the heap that each adds: each byte counts once."""
    end = 0
    for offset, size in sorted(places, key=lambda place: (place[0], -place[1])):
        if offset + size > end:
            yield (offset, size), offset + size - max(offset, end)
            end = offset + size


def _history(found: list[Value], live: list[Value]) -> list[Value]:
    """The values at a place that handed it on, without a gap, to those that live."""
    history = list(live)
    while True:
        start, end = min(v.start for v in history), max(v.end for v in history)
        near = [v for v in found if v.end >= start and v.start <= end]
        if len(near) == len(history):
            return history
        history = near
