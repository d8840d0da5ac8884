"""The buffers of a compiled step when most memory is in use, as XLA assigned them.

XLA writes its buffer assignment and the live range of each value to a folder
(``dump_options``). At each moment, the slots of live values are in use. The peak uses
nearly all of the heap, and what it leaves unused is fragmentation.
"""

import collections
import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from jshard.plan import hlo
from jshard.plan.hlo.program_text import HOST_SPACE

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_IN_SEQUENCE = re.compile(r"\s+(\d+):(\S+)$")

Place = tuple[int, int]  # offset and size in the heap
Ranges = dict[tuple[str, str], tuple[int, int]]  # by instruction and tuple index


class Value(NamedTuple):
    """A value in a buffer."""

    name: str  # of the instruction that computes it
    element: int | None  # of the instruction's result, or None if that is no tuple
    shape: str
    place: Place
    start: int  # when it is computed, as a position in the sequence of instructions
    end: int  # when it is last read


class Slot(NamedTuple):
    """A part of the heap that is in use at the peak."""

    nbytes: int
    values: tuple[Value, ...]  # live in it at the peak
    # These, and all values that passed the slot on to them or take it over from them
    # without a gap.
    history: tuple[Value, ...]

    @property
    def start(self) -> int:
        """When the first value of the history is computed."""
        return min(v.start for v in self.history)

    @property
    def end(self) -> int:
        """When the last value of the history is last read."""
        return max(v.end for v in self.history)


class Assignment(NamedTuple):
    """XLA's buffer assignment."""

    arguments: dict[int, int]  # bytes of each on the device, by position
    slots: list[Slot]  # of temporary memory in use at the peak
    fragmentation: int  # bytes of temporary memory that are not in use then
    fullest: str  # the instruction that runs at the peak
    sequence: list[str]  # instructions in execution order, with loop bodies once
    # The program as dumped; the printed one omits parts of asynchronous calls.
    module: hlo.Module


@contextlib.contextmanager
def dump_folder() -> Iterator[str]:
    """A folder for what one compilation with ``dump_options`` writes.

    JAX's cache is off meanwhile: a program from it would leave no buffer assignment.
    """
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # the cache reads its settings only once
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


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
        if f"color {HOST_SPACE}" in kind:
            continue
        if number := re.search(r"\bparameter (\d+)", kind):
            arguments[int(number[1])] = size
        elif "preallocated-temp" in kind:
            time, found = _peak(values)
            used = sum(slot.nbytes for slot in found)
            slots += found
            fragmentation += size - used
            if used > most:
                most, moment = used, time
    fullest = sequence[moment] if moment < len(sequence) else ""
    module = hlo.parse(_only(folder, "*_after_optimizations.txt"))
    return Assignment(arguments, slots, fragmentation, fullest, sequence, module)


def _only(folder: str | Path, pattern: str) -> str:
    found = sorted(Path(folder).glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} files {pattern}, not one")
    return found[0].read_text()


def _live(text: str) -> tuple[list[str], Ranges]:
    """The sequence of instructions, and the live range of each value."""
    sequence, ranges = [], {}
    for line in text.splitlines():
        if match := _RANGE.match(line):
            ranges[match[1], match[2]] = int(match[3]), int(match[4])
        elif match := _IN_SEQUENCE.match(line):
            sequence.append(match[2])
        elif "Live ranges at" in line:
            break
    return sequence, ranges


def _allocations(text: str, ranges: Ranges) -> list[tuple[int, str, list[Value]]]:
    """(size, kind, values) of each allocation."""
    found: list[tuple[int, str, list[Value]]] = []
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            found.append((int(match[1]), match[2], []))
        elif match := _VALUE.match(line):
            name, index, _, size, offset, shape = match.groups(default="")
            if live := ranges.get((name, index)):
                element = int(index.split(",")[0]) if index else None
                place = int(offset), int(size)
                found[-1][2].append(Value(name, element, shape, place, *live))
        elif not line.strip():
            break
    return found


def _peak(values: list[Value]) -> tuple[int, list[Slot]]:
    """When most bytes are in use, and the slots in use then."""
    changes: dict[int, list[tuple[Place, int]]] = collections.defaultdict(list)
    at: dict[Place, list[Value]] = collections.defaultdict(list)
    for value in values:
        at[value.place].append(value)
        changes[value.start].append((value.place, 1))
        changes[value.end + 1].append((value.place, -1))
    users: collections.Counter[Place] = collections.Counter()
    most, moment = 0, 0
    for time in sorted(changes):
        for place, change in changes[time]:
            users[place] += change
        covered = sum(nbytes for _, nbytes in _covered(+users))
        if covered > most:
            most, moment = covered, time
    live: dict[Place, list[Value]] = collections.defaultdict(list)
    for value in values:
        if value.start <= moment <= value.end:
            live[value.place].append(value)
    return moment, [
        Slot(nbytes, tuple(live[place]), _history(at[place], live[place]))
        for place, nbytes in _covered(live)
    ]


def _covered(places: Iterable[Place]) -> Iterator[tuple[Place, int]]:
    """The places, and the bytes that each adds: overlaps count once."""
    end = 0
    for offset, size in sorted(places, key=lambda place: (place[0], -place[1])):
        if offset + size > end:
            yield (offset, size), offset + size - max(offset, end)
            end = offset + size


def _history(values: list[Value], live: list[Value]) -> tuple[Value, ...]:
    """The values of a place whose live ranges connect, without a gap, to the peak's."""
    history = live
    while True:
        start, end = min(v.start for v in history), max(v.end for v in history)
        near = [v for v in values if v.end >= start and v.start <= end]
        if len(near) == len(history):
            return tuple(history)
        history = near
