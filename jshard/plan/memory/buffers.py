"""The buffers of a compiled step at its fullest moment, as XLA assigned them.

XLA writes its buffer assignment, and when each value lives, to a folder
(``dump_options``). A moment's bytes are those of the slots that live values have; the
fullest moment is nearly all of the heap, and what it leaves unused is fragmentation.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_IN_SEQUENCE = re.compile(r"\s+(\d+):(\S+)$")
_HOST_COLOR = 5  # XLA's memory space of pinned host memory


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
      temporary: bytes of temporary memory.
      sequence: the instructions in the order they run, loop bodies once.
      hlo: the compiled program as text.
    """

    arguments: dict[int, int]
    slots: tuple[Slot, ...]
    fragmentation: int
    temporary: int
    sequence: tuple[str, ...]
    hlo: str


def dump_options(folder: str | Path) -> dict[str, Any]:
    """Compiler options that make XLA write its buffer assignment to a folder."""
    return {"xla_dump_to": str(folder)}


def read(folder: str | Path) -> Assignment:
    """Reads what one compilation with ``dump_options`` wrote.

    Raises:
      ValueError: the folder has no buffer assignment of a GPU's program, or several.
    """
    text = _only(folder, "*gpu_after_optimizations-buffer-assignment.txt")
    sequence, ranges = _live(_only(folder, "*gpu_after_optimizations-live-range.txt"))
    arguments, slots, fragmentation, temporary = {}, [], 0, 0
    for size, kind, values in _allocations(text, ranges):
        hosted = f"color {_HOST_COLOR}" in kind
        number = re.search(r"\bparameter (\d+)", kind)
        if number and not hosted:
            arguments[int(number[1])] = size
        elif "preallocated-temp" in kind and not hosted:
            found = _fullest(values)
            slots += found
            temporary += size
            fragmentation += size - sum(slot.nbytes for slot in found)
    hlo = _only(folder, "*gpu_after_optimizations.txt")
    return Assignment(
        arguments, tuple(slots), fragmentation, temporary, tuple(sequence), hlo
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


def _fullest(values: list[tuple[Value, int, int]]) -> list[Slot]:
    """The slots in use when the most bytes are."""
    changes: dict[int, list[tuple[tuple[int, int], int]]]
    changes = collections.defaultdict(list)
    for value, offset, size in values:
        changes[value.start].append(((offset, size), 1))
        changes[value.end + 1].append(((offset, size), -1))
    users: collections.Counter = collections.Counter()
    most, moment = 0, 0
    for time in sorted(changes):
        for place, change in changes[time]:
            users[place] += change
        covered = sum(stop - start for start, stop in _covered(+users))
        if covered > most:
            most, moment = covered, time
    return list(_slots(values, moment))


def _covered(places: Any) -> Iterator[tuple[int, int]]:
    """The parts of the heap that places, (offset, size), cover: each byte once."""
    end = 0
    for offset, size in sorted(places, key=lambda place: (place[0], -place[1])):
        if offset + size > end:
            yield max(offset, end), offset + size
            end = offset + size


def _slots(values: list[tuple[Value, int, int]], moment: int) -> Iterator[Slot]:
    at: dict[tuple[int, int], list[Value]] = collections.defaultdict(list)
    for value, offset, size in values:
        at[offset, size].append(value)
    live = {
        place: here
        for place, found in at.items()
        if (here := [v for v in found if v.start <= moment <= v.end])
    }
    end = 0
    for place in sorted(live, key=lambda place: (place[0], -place[1])):
        offset, size = place
        if offset + size <= end:
            continue
        nbytes = offset + size - max(offset, end)
        end = offset + size
        history = _history(at[place], live[place])
        yield Slot(
            nbytes,
            tuple(live[place]),
            min(v.start for v in history),
            max(v.end for v in history),
            tuple(history),
        )


def _history(found: list[Value], live: list[Value]) -> list[Value]:
    """The values at a place that handed it on, without a gap, to those that live."""
    history = list(live)
    while True:
        start, end = min(v.start for v in history), max(v.end for v in history)
        near = [v for v in found if v.end >= start and v.start <= end]
        if len(near) == len(history):
            return history
        history = near
