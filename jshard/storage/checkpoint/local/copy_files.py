"""The files of local copies: the bytes of a process's shards, and a label that is last.

A folder has `OWNER/STEP.bytes` and `OWNER/STEP.json`, the label: a process that is
killed while it writes leaves bytes without one. A file that is not needed any more
becomes `OWNER/spare`, whose pages the next copy takes over.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jshard.storage.checkpoint.local.pieces import THREADS, Piece
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import parse_json

_BYTES, _LABEL, _SPARE, _TEXTS = ".bytes", ".json", "spare", "texts"
_FORGOTTEN = 86_400.0  # seconds without a new copy, after which another run's go


@dataclasses.dataclass(frozen=True)
class Label:
    """What a file of copies holds."""

    run: str
    start: int  # how many times the run had been started before it wrote this
    division: str  # the digest of the state's `Division`
    owner: int  # the process whose shards these are
    step: int  # the state's
    size: int  # bytes: all of the owner's, or those alone that no other host has
    sums: list[int]  # a CRC-32 for each piece
    texts: Mapping[str, str]  # what the owner keeps besides arrays, by name

    def text(self) -> str:
        """Returns the label as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> "Label":
        """Reads JSON; raises ValueError if it is no label."""
        try:
            return cls(**parse_json(text))
        except TypeError as error:
            raise ValueError("no label of a local copy") from error


def make_folder(root: Path, name: str) -> Path:
    """Makes the folder for the copies of a run, and removes other runs' forgotten ones.

    Args:
      root: Where it is made.
      name: The run's absolute path, or its URL.

    Raises:
      UserError: It cannot be made, or is another user's.
    """
    user = os.getuid()
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
    folder = root / f"jshard-{user}-{key}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_mine = folder.lstat().st_uid == user and not folder.is_symlink()
    except OSError as error:
        raise UserError(
            f"checkpoint.local: cannot make {folder}: {error.strerror}; give a folder "
            "of each host's own by --config.checkpoint.local_dir=DIR"
        ) from error
    if not is_mine:
        raise UserError(
            f"checkpoint.local: {folder} is another user's: give another folder by "
            "--config.checkpoint.local_dir=DIR"
        )
    for other in root.glob(f"jshard-{user}-*"):
        with suppress(OSError):  # that run ends just now
            newest = max(path.stat().st_mtime for path in (other, *other.iterdir()))
            if other != folder and time.time() - newest > _FORGOTTEN:
                shutil.rmtree(other)
    return folder


def create(folder: Path, owner: int, step: int, size: int) -> BinaryIO:
    """Opens the bytes of a new copy, which has no label yet.

    Raises:
      OSError: There is no room.
    """
    path = _path(folder, owner, step, _BYTES)
    path.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        path.with_name(_SPARE).rename(path)
    path.touch()
    file = path.open("r+b", buffering=0)
    file.truncate(size)
    return file


def write(file: BinaryIO, start: int, data: np.ndarray) -> None:
    """Writes bytes; several threads may. Raises OSError if there is no room."""
    rest = data.data
    while rest:  # a memory map would be slower, and end the process on a full disk
        count = os.pwrite(file.fileno(), rest, start)
        rest, start = rest[count:], start + count


def read(folder: Path, owner: int, step: int) -> np.ndarray:
    """Returns the bytes of a copy, which are read as they are used."""
    path = _path(folder, owner, step, _BYTES)
    empty = not path.stat().st_size
    return np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, "r")


def sums(data: np.ndarray, pieces: Iterable[Piece]) -> list[int]:
    """Returns the checksums of those pieces that data have."""
    ends = ((piece.start, piece.start + piece.size) for piece in pieces)
    parts = [data[start:end] for start, end in ends if end <= len(data)]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(zlib.crc32, parts))


def seal(folder: Path, label: Label) -> None:
    """Labels a copy whose bytes are complete."""
    path = _path(folder, label.owner, label.step, _LABEL)
    replace_file(path, label.text())


def labels(folder: Path) -> list[Label]:
    """Returns the labels of all complete copies in a folder."""
    found = []
    for owner, step in listed(folder):
        with suppress(OSError, ValueError):  # removed just now, or no label: no copy
            label = Label.read(_path(folder, owner, step, _LABEL).read_bytes())
            size = _path(folder, owner, step, _BYTES).stat().st_size
            if (label.owner, label.step, label.size) == (owner, step, size):
                found.append(label)
    return found


def listed(folder: Path) -> list[tuple[int, int]]:
    """Returns the owner and the step of each label in a folder."""
    paths = folder.glob(f"*/*{_LABEL}")
    return sorted((int(path.parent.name), int(path.stem)) for path in paths)


def open_bytes(folder: Path, owner: int, step: int) -> BinaryIO:
    """Opens the bytes of a copy, to be sent."""
    return _path(folder, owner, step, _BYTES).open("rb")


def unpack(folder: Path, owner: int, texts: Mapping[str, str]) -> Path:
    """Writes the texts of a copy as files; returns their folder."""
    place = folder / str(owner) / _TEXTS
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def drop(folder: Path, owner: int, step: int, *, reuse: bool = False) -> None:
    """Removes a copy; its pages stay for the next one if they are to be reused."""
    _path(folder, owner, step, _LABEL).unlink(missing_ok=True)
    path = _path(folder, owner, step, _BYTES)
    with suppress(FileNotFoundError):
        path.rename(path.with_name(_SPARE)) if reuse else path.unlink()


def tidy(folder: Path, kept: Iterable[Label]) -> None:
    """Removes all but some copies, and what has no label."""
    known = {(str(label.owner), str(label.step)) for label in kept}
    for path in folder.glob("*/*"):
        if (path.parent.name, path.stem) not in known and path.is_file():
            path.unlink(missing_ok=True)


def used(folder: Path) -> int:
    """Returns the bytes that a folder takes."""
    return sum(path.stat().st_size for path in folder.glob("*/*"))


def _path(folder: Path, owner: int, step: int, suffix: str) -> Path:
    return folder / str(owner) / f"{step}{suffix}"
