"""The manifest of a checkpoint: a checksum of every file, written last.

A step's folder counts as a checkpoint only if its manifest matches its files. Orbax
notices missing and truncated files, but would load a flipped bit as wrong weights. The
hash is for damage, at the speed of memory; against forgery nothing in a folder helps.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import path_inside, read_json

FILE = "manifest.json"
FORMAT = 1  # of a step's folder; incremented when an older jshard could not read it

THREADS = min(8, os.cpu_count() or 1)  # hashing releases the GIL


class ManifestError(Exception):
    """A manifest that is missing or damaged."""


def checksum(
    folder: Path, below: str, index: int = 0, count: int = 1
) -> dict[str, Any]:
    """Hashes one process's share of the files in a step's folder.

    Args:
      folder: The step's folder.
      below: The file or subfolder to hash.
      index: Which share.
      count: The number of shares; files are dealt out in turn, largest first.

    Returns:
      ``{"state/d/1af0...": {"bytes": 4096, "xxh3": "..."}}``.
    """
    top = folder / below
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file()
    }
    return _hash(folder, _share(sizes, index, count))


def write(
    folder: Path, files: dict[str, Any], arrays: Mapping[str, Any] | None = None
) -> None:
    """Writes the manifest of a step from the checksums of all its files.

    For arrays in a bucket, ``arrays`` has their "url", "bytes" and "objects": what
    identifies each object, by path.
    """
    content = {"format": FORMAT, "files": dict(sorted(files.items()))}
    if arrays:
        content["arrays"] = arrays
    replace_file(folder / FILE, json.dumps(content, indent=1))


def verify(folder: Path, index: int = 0, count: int = 1) -> list[str]:
    """Compares one process's share of a step's files with the manifest.

    The arguments are those of ``checksum``. Returns a description of each problem.

    Raises:
      UserError: A newer jshard wrote the checkpoint.
    """
    try:
        files = read(folder)
    except ManifestError as error:
        return [str(error)]
    problems, sizes = _linked(folder, files), {}
    for name in sorted(files):
        expected = files[name]["bytes"]
        try:
            status = (folder / name).lstat()
        except OSError:
            problems.append(f"{name} is missing")
            continue
        sizes[name] = status.st_size
        if not stat.S_ISREG(status.st_mode):  # a link, or a pipe, which may never end
            problems.append(f"{name} is not a regular file")
        elif sizes[name] != expected:
            problems.append(f"{name} has {sizes[name]} bytes, not {expected}")
    if problems:  # every process finds the same ones, without reading any file
        return problems
    hashes = _hash(folder, _share(sizes, index, count))
    return [
        f"{name} has another checksum"
        for name, found in hashes.items()
        if found != files[name]
    ]


def read(folder: Path) -> dict[str, Any]:
    """Returns the files listed in a step's manifest.

    Raises:
      ManifestError: It is missing or damaged.
      UserError: A newer jshard wrote it.
    """
    try:
        content = _content(folder)
        if content["format"] <= FORMAT:
            for name in content["files"]:
                path_inside(folder, name)
            return {name: _checked(file) for name, file in content["files"].items()}
    except OSError as error:
        raise ManifestError(f"{FILE} cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ManifestError(f"{FILE} is damaged") from error
    raise UserError(
        f"{folder} was written by a newer jshard (format {content['format']}; "
        f"this one reads up to {FORMAT}): upgrade jshard"
    )


def read_arrays(folder: Path) -> dict[str, Any]:
    """Returns the ``arrays`` of ``write``.

    Raises:
      ManifestError: It is missing or damaged.
    """
    try:
        arrays = _content(folder)["arrays"]
        objects = arrays["objects"]
        return {
            "url": str(arrays["url"]),
            "bytes": int(arrays["bytes"]),
            "objects": {path: bytes.fromhex(x).hex() for path, x in objects.items()},
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ManifestError(f"{FILE} is damaged") from error


def _content(folder: Path) -> Any:
    if (folder / FILE).is_symlink():  # like any other file of a step
        raise ManifestError(f"{FILE} is not a regular file")
    return read_json(folder / FILE)


def _checked(file: Any) -> dict[str, Any]:
    """Returns the entry of a file; raises ValueError if it is none."""
    size, digest = file["bytes"], file["xxh3"]
    if type(size) is not int or not 0 <= size < 2**63 or not isinstance(digest, str):
        raise ValueError("no size and checksum of a file")
    return {"bytes": size, "xxh3": digest}


def _linked(folder: Path, names: Iterable[str]) -> list[str]:
    """Returns a problem for each subfolder of the files that is a link elsewhere."""
    subfolders = {Path(name).parent for name in names}
    top = folder.resolve()
    return [
        f"{name} leads out of the checkpoint"
        for name in sorted(subfolders)
        if not (top / name).resolve().is_relative_to(top)
    ]


def _share(sizes: dict[str, int], index: int, count: int) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))[index::count]


def _hash(folder: Path, names: list[str]) -> dict[str, Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(lambda name: _hash_file(folder / name), names)
        return dict(zip(names, hashes, strict=True))


def _hash_file(path: Path) -> dict[str, Any]:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return {"bytes": file.tell(), "xxh3": digest.hexdigest()}
