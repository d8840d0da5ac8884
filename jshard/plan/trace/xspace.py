"""Opens a file of XLA's profiler (``XSpace``) in pieces.

A whole file takes six times its size in memory. Only the outermost fields are read
here: planes, their lines, and the events of those.
"""

import contextlib
import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

_PIECE = 4 << 20  # bytes of events
_PLANES = 1  # of XSpace
_NAME, _LINES = 2, 3  # of XPlane
_EVENTS = 4  # of XLine
_CLOCK = b"Task Environment"  # the plane that says when a profile began


class _Field(NamedTuple):
    """Where a field of a message is in the file."""

    number: int
    start: int
    value: int  # where its value begins
    end: int


def open_xspace(file: Path) -> Iterator[Any]:
    """Yields ``ProfileData`` that are a file together: each of a part of one line.

    Raises:
      EOFError: it is cut off.
      OSError, RuntimeError, ValueError: it cannot be read, or is no profile.
    """
    with _mapped(file) as data:
        for fields in _planes(data):
            about = _without(data, fields, _LINES)
            for line in fields:
                if line.number == _LINES:
                    for piece in _pieces(data, line):
                        yield _profile(about + _message(_LINES, piece))


def began(file: Path) -> int:
    """Returns when a profile began, in nanoseconds of its host's clock; 0 if unknown.

    Raises:
      EOFError, OSError, RuntimeError, ValueError: as `open_xspace` does.
    """
    with _mapped(file) as data:
        for fields in _planes(data):
            names = [data[x.value : x.end] for x in fields if x.number == _NAME]
            if names == [_CLOCK]:
                about = _without(data, fields, _LINES)
                (plane,) = _profile(about).planes
                return int(dict(plane.stats).get("profile_start_time", 0))
    return 0


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield data


def _planes(data: mmap.mmap) -> Iterator[list[_Field]]:
    for x in _fields(data, 0, len(data)):
        if x.number == _PLANES:
            yield list(_fields(data, x.value, x.end))


def _without(data: mmap.mmap, fields: list[_Field], number: int) -> bytes:
    """Returns a message without fields of one number."""
    return b"".join(data[x.start : x.end] for x in fields if x.number != number)


def _profile(plane: bytes) -> Any:
    return ProfileData.from_serialized_xspace(_message(_PLANES, plane))


def _pieces(data: mmap.mmap, line: _Field) -> Iterator[bytes]:
    if line.end - line.value <= _PIECE:
        yield data[line.value : line.end]
        return
    about, cuts = [], [line.value]
    for x in _fields(data, line.value, line.end):
        if x.number != _EVENTS:
            about.append(data[x.start : x.end])
        elif x.end - cuts[-1] > _PIECE:
            cuts.append(x.end)
    for start, end in itertools.pairwise([*cuts, line.end]):
        yield b"".join(about) + data[start:end]


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[_Field]:
    """Yields the fields of a message, in Protocol Buffers' wire format."""
    while at < end:
        start = at
        key, at = _varint(data, at, end)
        kind, value = key & 7, at
        if kind == 2:
            length, value = _varint(data, at, end)
            at = value + length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {start} begins no field")
        if at > end:
            raise EOFError(f"{at - end} bytes are missing")
        yield _Field(key >> 3, start, value, at)


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Returns a number and where it ends."""
    if at < end and data[at] < 128:  # most are short
        return data[at], at + 1
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than ten bytes")
    raise EOFError("its last number is not whole")


def _message(number: int, value: bytes) -> bytes:
    """Returns a field that is a message."""
    length, rest = bytearray(), len(value)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    length.append(rest)
    return bytes([number << 3 | 2]) + length + value
