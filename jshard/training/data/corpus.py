"""A corpus: files of tokens, and which of them are held out for validation."""

import dataclasses
import functools
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from jshard.errors import UserError

# Not source text worth learning: tests, tables, other people's code, and what differs
# between two installations of one Python.
_STDLIB_SKIP = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"),
    *("lib2to3", "distutils", "turtledemo", "encodings", "pydoc_data", "__pycache__"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)
# "val.bin", "fineweb_val_000.bin", "validation/0.bin"; not "retrieval.bin".
_VALIDATION_NAME = re.compile(
    r"(?<![a-z])val(id(ation)?)?(?![a-z])", flags=re.IGNORECASE
)
# The 1024-byte header of llm.c's token files: int32 magic, version, number of tokens.
_HEADER_MAGIC = {20240520: "uint16", 20240801: "uint32"}
_HEADER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one file.

    Attributes:
      file: Where they are from.
      name: The file's path below the corpus' folder, with "/".
      start: The first of the file's tokens that is in the piece.
      stop: The token after the last.
      load: Returns all tokens of the file, unsigned integers [n]. A memory map is
        opened here and not kept: a thousand files would use up the descriptors.
    """

    file: Path
    name: str
    start: int
    stop: int
    load: Callable[[], np.ndarray]

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the piece, clipped at its end."""
        return self.load()[self.start + start : min(self.start + stop, self.stop)]


def split_corpus(
    path: str, *, validation_fraction: float, token_dtype: str
) -> dict[str, list[Piece]]:
    """Returns the pieces of each split; see `text_data` for the rules.

    Args:
      path: "", a text file, a `.bin` file, or a folder of either.
      validation_fraction: Of the files (text) or tokens (one file, or `.bin`).
      token_dtype: "uint16" or "uint32", of `.bin` files.

    Raises:
      UserError: Nothing there, nothing in it, or it cannot be read as tokens.
    """
    if path == "":
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _files(stdlib, skip=_STDLIB_SKIP) if f.suffix == ".py"]
        pieces = _text_pieces(stdlib, files)
        if not pieces:  # an interpreter that carries it compiled, or in a zip file
            raise UserError(
                f"{stdlib}: no source of Python's standard library here, the default "
                "text; set data.path to a text file or folder"
            )
        return _hold_out_files(pieces, validation_fraction)

    root = Path(path).expanduser()
    if not os.path.exists(root):  # nor raises where looking is not allowed
        raise UserError(
            f"{root}: no such file or folder; set data.path to a text file, a .bin "
            "file of tokens, or a folder of either ('' is a built-in text)"
        )
    if root.is_file():
        if root.suffix == ".bin":
            pieces = [_token_piece(root, root.name, token_dtype)]
        else:
            pieces = [_text_piece(root)]
        return _hold_out_tail(pieces, validation_fraction)

    files = _files(root)
    token_files = [file for file in files if file.suffix == ".bin"]
    if token_files:
        pieces = [
            _token_piece(file, file.relative_to(root).as_posix(), token_dtype)
            for file in token_files
        ]
    else:
        pieces = _text_pieces(root, files)
    if not pieces:
        raise UserError(
            f"{root}: the folder has no text and no .bin files; set data.path to one "
            "that has"
        )
    if any(_VALIDATION_NAME.search(piece.name) for piece in pieces):
        return _hold_out_named(pieces)
    if token_files or len(pieces) == 1:
        return _hold_out_tail(pieces, validation_fraction)
    return _hold_out_files(pieces, validation_fraction)


def _hold_out_named(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    """Holds out the files that are called validation."""
    train, validation = [], []
    for piece in pieces:
        named = _VALIDATION_NAME.search(piece.name)
        (validation if named else train).append(piece)
    if not train:
        raise UserError(
            f"{pieces[0].file}: this and all other files in data.path are named as "
            "validation data; rename those to train on"
        )
    return {"train": train, "validation": validation}


def _hold_out_files(pieces: Sequence[Piece], fraction: float) -> dict[str, list[Piece]]:
    """Holds out files by their names, so that new files move no old one."""

    def rank(piece: Piece) -> float:  # uniform in [0, 1)
        digest = hashlib.blake2b(piece.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    count = sum(rank(piece) < fraction for piece in pieces)
    if fraction > 0:  # at least one file on either side
        count = min(max(count, 1), len(pieces) - 1)
    held_out = {piece.name for piece in sorted(pieces, key=rank)[:count]}
    return {
        "train": [piece for piece in pieces if piece.name not in held_out],
        "validation": [piece for piece in pieces if piece.name in held_out],
    }


def _hold_out_tail(pieces: Sequence[Piece], fraction: float) -> dict[str, list[Piece]]:
    """Holds out the last tokens of all."""
    total = sum(map(len, pieces))
    boundary = total - round(total * fraction)
    train, validation, offset = [], [], 0
    for piece in pieces:
        cut = min(max(boundary - offset, 0), len(piece)) + piece.start
        if cut > piece.start:
            train.append(dataclasses.replace(piece, stop=cut))
        if cut < piece.stop:
            validation.append(dataclasses.replace(piece, start=cut))
        offset += len(piece)
    return {"train": train, "validation": validation}


def _files(root: Path, skip: Sequence[str] = ()) -> list[Path]:
    """All files under root, sorted, but for hidden ones and names like `skip`."""

    def keep(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch(name, s) for s in skip)

    def fail(error: OSError) -> None:
        raise UserError(_unreadable(Path(error.filename), error))

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = filter(keep, folders)
        found += [Path(folder, name) for name in filter(keep, names)]
    return sorted(found)


def _text_pieces(root: Path, files: Sequence[Path]) -> list[Piece]:
    """Reads the files that are text, each followed by one zero byte."""
    pieces, binary = [], []
    for file in files:
        data = _read_bytes(file)
        if _not_text(data):
            binary.append(file)
        elif data:
            name = file.relative_to(root).as_posix()
            pieces.append(_bytes_piece(file, name, data + b"\0"))
    if binary:
        warnings.warn(
            f"{root}: {len(binary)} of {len(files)} files are not UTF-8 text and were "
            f"left out, the first is {binary[0]}",
            stacklevel=4,  # the caller of text_data
        )
    return pieces


def _text_piece(file: Path) -> Piece:
    data = _read_bytes(file)
    if not data:
        raise UserError(f"{file}: the file is empty; set data.path to one with text")
    if reason := _not_text(data):
        raise UserError(
            f"{file}: not UTF-8 text ({reason}); convert it, or name a file of tokens "
            ".bin"
        )
    return _bytes_piece(file, file.name, data)


def _bytes_piece(file: Path, name: str, data: bytes) -> Piece:
    tokens = np.frombuffer(data, np.uint8)
    return Piece(file, name, 0, len(tokens), functools.partial(np.asarray, tokens))


def _not_text(data: bytes) -> str:
    """Why these bytes are not text, or ""."""
    if (position := data.find(0)) >= 0:
        return f"a zero byte at {position}"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _token_piece(file: Path, name: str, token_dtype: str) -> Piece:
    itemsize = np.dtype(token_dtype).itemsize
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    except OSError as error:
        raise UserError(_unreadable(file, error)) from error
    offset = 0
    if (wanted := _HEADER_MAGIC.get(int(header[0]))) is not None:
        offset = _HEADER_BYTES
        if wanted != token_dtype or size != offset + int(header[2]) * itemsize:
            raise UserError(
                f"{file}: its header says {header[2]} tokens of {wanted}, which is not "
                f"{size} bytes of {token_dtype}; set data.token_dtype, or get it again"
            )
    if size == offset:
        raise UserError(f"{file}: the file is empty; remove it, or get it again")
    if size % itemsize:
        raise UserError(
            f"{file}: {size} bytes are not a whole number of {token_dtype} tokens; "
            "set data.token_dtype, or get the file again"
        )
    length = (size - offset) // itemsize
    load = functools.partial(_memmap, file, token_dtype, offset, length)
    return Piece(file, name, 0, length, load)


@functools.lru_cache(maxsize=256)
def _memmap(file: Path, dtype: str, offset: int, length: int) -> np.ndarray:
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r", offset, (length,))


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(_unreadable(file, error)) from error


def _unreadable(file: Path, error: OSError) -> str:
    return (
        f"{file}: cannot be read ({error.strerror}); make it readable, or move it out "
        "of data.path"
    )
