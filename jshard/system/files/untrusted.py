"""Reads files that strangers wrote: JSON within limits, names that stay in a folder."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_JSON = 2**25  # bytes of a file; the index of the largest models has 9 MB
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST = 255  # bytes of a name, on all file systems in use
POINTER = "a pointer of Git LFS, not the file: run git lfs pull in its folder"
_DEEPEST = 100  # levels; what reads the values may recurse, and Python's limit is 1000


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; also raises ValueError where it is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    opened = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    if sum(map(text.count, opened)) < _DEEPEST:  # pyright: ignore[reportArgumentType]
        return value  # the usual: looking at all of it takes longer than parsing
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def _members(value: Any) -> Iterable[Any]:
    """Returns the values in a JSON object or array."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(file: Path, most: int | None = None) -> Any:
    """Reads a JSON file of at most so many bytes, by default ``MOST_JSON``.

    Raises:
      OSError: It cannot be read, or it is a pipe or a device, which may never end.
      ValueError: It is not JSON, or larger or nested deeper than what is meant here.
    """
    return parse_json(_read(file, most or MOST_JSON))


def read_text(file: Path, most: int = MOST_JSON) -> str:
    """Reads a text file of at most so many bytes.

    Raises:
      OSError: It cannot be read, or it is a pipe or a device, which may never end.
      ValueError: It is not UTF-8, or larger than what is meant here.
    """
    return _read(file, most).decode()


def _read(file: Path, most: int) -> bytes:
    status = file.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    if status.st_size > most:
        raise ValueError(f"{status.st_size:,} bytes, more than {most:,}")
    if is_pointer(file):
        raise ValueError(POINTER)
    return file.read_bytes()


def is_pointer(file: Path) -> bool:
    """Returns whether Git LFS has left a file where it is, and a note of it here."""
    with file.open("rb") as stream:
        return stream.read(40).startswith(b"version https://git-lfs.github.com/")


def path_inside(folder: Path, name: Any) -> Path:
    """Returns the path of a file of ``folder``, from its name in a list of files.

    Raises:
      ValueError: It is no such name: absolute, with "..", with control characters,
        longer than file systems take, or no path at all.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or _CONTROL.search(name):
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    # fsencode raises UnicodeEncodeError, a ValueError.
    if max(len(os.fsencode(part)) for part in parts) > _LONGEST:
        raise ValueError(f"{name[:40]!r}... is longer than the name of a file can be")
    return folder / name
