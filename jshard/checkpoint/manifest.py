"""The manifest of a checkpoint: a checksum of every file, written last.

A step's folder counts as a checkpoint only with a manifest that agrees with its files.
Orbax notices files that are missing or cut short; one flipped bit in a data file it
would load as wrong weights.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jshard.checkpoint.atomic import replace_file
from jshard.errors import UserError

FILE = "manifest.json"
FORMAT = 1  # of the step's folder: raised when an older jshard could not read it

_BLOCK = 1 << 22  # bytes hashed at a time: small beside a file, large beside a call
_THREADS = min(8, os.cpu_count() or 1)  # hashing releases the interpreter's lock


def checksum(
    folder: Path, below: str, index: int = 0, count: int = 1
) -> dict[str, Any]:
    """Reads and hashes one process's part of a step's files.

    Args:
      folder: of the step.
      below: the file, or the folder of files, in it to hash.
      index: which part.
      count: in how many parts the files are split, the largest first in turn.

    Returns:
      ``{"state/d/1af0...": {"bytes": 4096, "sha256": "..."}}``.
    """
    top = folder / below
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file()
    }
    return _hash(folder, _part(sizes, index, count))


def write(folder: Path, files: dict[str, Any]) -> None:
    """Writes the manifest, on the disk when this returns.

    Args:
      folder: of one step.
      files: what ``checksum`` gave, all parts together.
    """
    content = {"format": FORMAT, "files": dict(sorted(files.items()))}
    replace_file(folder / FILE, json.dumps(content, indent=1))


def verify(folder: Path, index: int = 0, count: int = 1) -> list[str]:
    """Compares one process's part of a step's files with the manifest.

    Args:
      folder: of one step.
      index: which part; the files are split alike on every process.
      count: in how many parts.

    Returns:
      What is wrong, a few words for each file; empty when all is well.

    Raises:
      UserError: a newer jshard wrote the checkpoint.
    """
    try:
        files = read(folder)
    except UserError:
        raise
    except OSError as error:
        return [f"{FILE} cannot be read ({error.strerror})"]
    except ValueError:
        return [f"{FILE} is damaged"]
    problems, sizes = [], {}
    for name in sorted(files):
        try:
            sizes[name] = (folder / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if sizes[name] != files[name]["bytes"]:
            problems.append(
                f"{name} has {sizes.pop(name)} bytes, not {files[name]['bytes']}"
            )
    if problems:  # told by every process alike, and nothing needs to be read
        return problems
    for name, found in _hash(folder, _part(sizes, index, count)).items():
        if found != files[name]:
            problems.append(f"{name} has another checksum")
    return problems


def read(folder: Path) -> dict[str, Any]:
    """Returns the files that a step's manifest lists.

    Raises:
      OSError: there is none, or it cannot be read.
      UserError: a newer jshard wrote it.
      ValueError: it is damaged.
    """
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ValueError("no manifest")
    if content["format"] > FORMAT:
        raise UserError(
            f"{folder} was written by a newer jshard (format {content['format']}; "
            f"this one reads up to {FORMAT}): upgrade jshard"
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(file, dict) and file.keys() >= {"bytes", "sha256"}
        for file in files.values()
    ):
        raise ValueError("no files")
    return files


def _part(sizes: dict[str, int], index: int, count: int) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))[index::count]


def _hash(folder: Path, names: list[str]) -> dict[str, Any]:
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda name: _hash_file(folder / name), names)
        return dict(zip(names, hashes, strict=True))


def _hash_file(path: Path) -> dict[str, Any]:
    digest, size, block = hashlib.sha256(), 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}
