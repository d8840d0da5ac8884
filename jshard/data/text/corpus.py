"""A corpus: files of text or tokens, and their training and validation splits."""

import dataclasses
import functools
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from jshard.cli.paths import check_path
from jshard.data.text.encoded import Encoded, encode_files
from jshard.data.text.records import with_records
from jshard.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from jshard.errors import UserError

# Tests, tables and third-party code, and files that differ between installations of
# the same Python version.
_STDLIB_SKIP = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"),
    *("lib2to3", "distutils", "turtledemo", "encodings", "pydoc_data", "__pycache__"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)
# Matches "val.bin", "fineweb_val_000.bin", "validation/0.bin"; not "retrieval.bin".
VALIDATION_NAME = re.compile(
    r"(?<![a-z])val(id(ation)?)?(?![a-z])", flags=re.IGNORECASE
)
# The 1024-byte header of llm.c's token files: int32 magic, version, number of tokens.
_HEADER_MAGIC = {20240520: "uint16", 20240801: "uint32"}
_HEADER_BYTES = 1024
UNFINISHED = ".unfinished-tokens"  # the folder in which jshard.tokenize works
TRAINED = ".trained"  # beside .bin: a byte for each token, 1 if it is a target


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a file.

    Attributes:
      file: The file.
      name: Its path in the corpus' folder, with "/".
      start: The first token.
      stop: The token after the last.
      load: Returns all tokens of the file, unsigned integers [n]. Opens memory maps
        when called, because the open maps of a thousand files would use up the file
        descriptors.
      ends: Returns the token after the last of each document of the file, integers
        [documents]. None if the file is one document, or if that of `.bin` is unknown.
      trained: Returns which tokens of the file are targets, bool[n]; None for all.
    """

    file: Path
    name: str
    start: int
    stop: int
    load: Callable[[], np.ndarray]
    ends: Callable[[], np.ndarray] | None = None
    trained: Callable[[], np.ndarray] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the piece, clipped at its end."""
        return self.load()[self.start + start : min(self.start + stop, self.stop)]

    def read_weights(self, start: int, stop: int) -> np.ndarray | float:
        """Returns the weights of tokens [start, stop) as targets: 0 or 1."""
        if self.trained is None:
            return 1.0
        return self.trained()[self.start + start : min(self.start + stop, self.stop)]


def split_corpus(
    path: str,
    *,
    validation_fraction: float,
    token_dtype: str,
    tokenizer: Tokenizer | None = None,
    text_key: str = "text",
) -> dict[str, list[Piece]]:
    """Returns the pieces of the "train" and "validation" splits.

    `text_data` documents the arguments and the rules; without a tokenizer, tokens are
    bytes.

    Raises:
      UserError: `path` does not exist, is empty, or cannot be read as tokens.
    """
    if path == "":
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _files(root, _STDLIB_SKIP) if file.suffix == ".py"]
        pieces = _text_pieces(root, files)
        if not pieces:  # an interpreter with a compiled or zipped library
            raise UserError(
                f"{root}: has no source of Python's standard library, the default "
                "text; set data.path to a text file or folder"
            )
        pieces = _tokenized(pieces, tokenizer, text_key)
        return _hold_out_files(pieces, _chosen(pieces, validation_fraction))

    check_path("data.path", path)
    root = Path(path).expanduser()
    _check_exists(root)
    is_file = root.is_file()
    files, folder = ([root], root.parent) if is_file else (_files(root), root)
    token_files = [file for file in files if file.suffix == ".bin"]
    if token_files:
        if (folder / UNFINISHED).exists():
            raise UserError(
                f"{root}: jshard.tokenize has not finished here; run it again"
            )
        pieces = [_token_piece(file, folder, token_dtype) for file in token_files]
    elif record_files := with_records(files):
        pieces = _encoded_pieces(
            record_files, folder, tokenizer or ByteTokenizer(), text_key
        )
    else:
        pieces = [_single_text(root)] if is_file else _text_pieces(root, files)
        pieces = _tokenized(pieces, tokenizer, text_key)
    if not pieces:
        what = "file has no text" if is_file else "folder has no text and no .bin files"
        raise UserError(f"{root}: the {what}; set data.path to one that has")
    named = [piece for piece in pieces if VALIDATION_NAME.search(piece.name)]
    if named and not is_file:
        if len(named) == len(pieces):
            raise UserError(
                f"{pieces[0].file}: this and all other files in data.path are named as "
                "validation data; rename those to train on"
            )
        return _hold_out_files(pieces, named)
    if token_files or len(pieces) == 1:
        return _hold_out_tail(pieces, validation_fraction)
    return _hold_out_files(pieces, _chosen(pieces, validation_fraction))


def _check_exists(root: Path) -> None:
    if not os.path.exists(root):  # Path.exists raises if a parent is not readable
        raise UserError(
            f"{root}: no such file or folder; set data.path to a text file, a .bin "
            "file of tokens, JSONL, Parquet, or a folder of these ('' is a built-in "
            "text)"
        )


def _chosen(pieces: Sequence[Piece], fraction: float) -> list[Piece]:
    """Chooses files by a hash of their names, so that new files do not move old ones.

    If `fraction` is not 0, both splits get at least one file.
    """

    def rank(piece: Piece) -> float:  # uniform in [0, 1)
        digest = hashlib.blake2b(piece.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    count = sum(rank(piece) < fraction for piece in pieces)
    if fraction > 0:
        count = min(max(count, 1), len(pieces) - 1)
    return sorted(pieces, key=rank)[:count]


def _hold_out_files(
    pieces: Sequence[Piece], held_out: Sequence[Piece]
) -> dict[str, list[Piece]]:
    names = {piece.name for piece in held_out}
    return {
        "train": [piece for piece in pieces if piece.name not in names],
        "validation": [piece for piece in pieces if piece.name in names],
    }


def _hold_out_tail(pieces: Sequence[Piece], fraction: float) -> dict[str, list[Piece]]:
    """Holds out the last tokens of all pieces together."""
    total = sum(map(len, pieces))
    boundary = total - round(total * fraction)
    train, validation, offset = [], [], 0
    for piece in pieces:
        cut = min(max(boundary - offset, 0), len(piece)) + piece.start
        ends = np.zeros(0) if piece.ends is None else piece.ends()
        if len(ends) > 1 and 0 < cut < piece.stop:  # no document is divided
            cut = int(ends[max(np.searchsorted(ends, cut, "right") - 1, 0)])
            cut = min(cut, piece.stop)  # a damaged index need not ascend
        if cut > piece.start:
            train.append(dataclasses.replace(piece, stop=cut))
        if cut < piece.stop:
            validation.append(dataclasses.replace(piece, start=cut))
        offset += len(piece)
    return {"train": train, "validation": validation}


def _files(root: Path, skip: Sequence[str] = ()) -> list[Path]:
    """Returns all files under `root`, sorted, without hidden and skipped names."""

    def keep(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch(name, s) for s in skip)

    def fail(error: OSError) -> None:
        raise error

    found = []
    with _reading(root):
        for folder, folders, names in os.walk(root, onerror=fail):
            folders[:] = filter(keep, folders)
            found += [Path(folder, name) for name in filter(keep, names)]
    for file in found:  # a pipe or a device may never end
        if os.path.exists(file) and not os.path.isfile(file):
            raise UserError(f"{file}: not a regular file; move it out of data.path")
    return sorted(found)


def corpus_files(path: Path) -> list[tuple[Path, str]]:
    """Returns the files with text or records at a path, and their names there."""
    root = path.expanduser()
    _check_exists(root)
    files, folder = ([root], root.parent) if root.is_file() else (_files(root), root)
    if tokens := [file for file in files if file.suffix == ".bin"]:
        raise UserError(f"{tokens[0]}: holds tokens already; give text or records")
    found = with_records(files)
    if not found:
        found = [file for file, _ in _texts(root, files)] if root.is_dir() else files
    return [(file, file.relative_to(folder).as_posix()) for file in found]


def _text_pieces(root: Path, files: Sequence[Path]) -> list[Piece]:
    """Reads the files that are text, and ends each with a zero byte."""
    pieces = []
    for file, data in _texts(root, files):
        name = file.relative_to(root).as_posix()
        pieces.append(_text_piece(file, name, data + b"\0"))
    return pieces


def _texts(root: Path, files: Sequence[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yields the files that are text, and what they hold; warns of others."""
    binary = []
    for file in files:
        with _reading(file):
            data = file.read_bytes()
        if _not_text(data):
            binary.append(file)
        elif data:
            yield file, data
    if binary:
        warnings.warn(
            f"{root}: skipped {len(binary)} of {len(files)} files that are not UTF-8 "
            f"text; the first is {binary[0]}",
            stacklevel=6,  # the caller of text_data
        )


def _single_text(file: Path) -> Piece:
    with _reading(file):
        data = file.read_bytes()
    if not data:
        raise UserError(f"{file}: the file is empty; set data.path to one with text")
    if reason := _not_text(data):
        raise UserError(
            f"{file}: not UTF-8 text ({reason}); convert it, or rename a file of "
            "tokens to .bin"
        )
    return _text_piece(file, file.name, data)


def _text_piece(file: Path, name: str, data: bytes) -> Piece:
    tokens = np.frombuffer(data, np.uint8)
    return Piece(file, name, 0, len(tokens), lambda: tokens)


def _tokenized(
    pieces: list[Piece], tokenizer: Tokenizer | None, text_key: str
) -> list[Piece]:
    """Returns pieces of text as pieces of the tokenizer's tokens."""
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return pieces
    files = [piece.file for piece in pieces]
    names = {piece.file: piece.name for piece in pieces}
    found = zip(files, encode_files(files, tokenizer, text_key), strict=True)
    return [_encoded_piece(file, names[file], encoded) for file, encoded in found]


def _encoded_pieces(
    files: Sequence[Path], folder: Path, tokenizer: Tokenizer, text_key: str
) -> list[Piece]:
    """Returns the documents of files of records."""
    encoded = encode_files(files, tokenizer, text_key)
    return [
        _encoded_piece(file, file.relative_to(folder).as_posix(), found)
        for file, found in zip(files, encoded, strict=True)
        if len(found.tokens)
    ]


def _encoded_piece(file: Path, name: str, found: Encoded) -> Piece:
    trained = found.trained
    return Piece(
        file,
        name,
        0,
        len(found.tokens),
        load=lambda: found.tokens,
        ends=(lambda: found.ends) if len(found.ends) > 1 else None,
        trained=None if trained is None else (lambda: trained),
    )


def _not_text(data: bytes) -> str:
    """Returns why these bytes are not text, or ""."""
    if (position := data.find(0)) >= 0:
        return f"a zero byte at {position}"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _token_piece(file: Path, folder: Path, token_dtype: str) -> Piece:
    itemsize = np.dtype(token_dtype).itemsize
    with _reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    offset = 0
    if (wanted := _HEADER_MAGIC.get(int(header[0]))) is not None:
        offset = _HEADER_BYTES
        expected = offset + int(header[2]) * itemsize
        if wanted != token_dtype or header[2] < 0 or size != expected:
            raise UserError(
                f"{file}: its header says {header[2]} tokens of {wanted}, which does "
                f"not match {size} bytes of {token_dtype}; set data.token_dtype, or "
                "download the file again"
            )
    if size == offset:
        raise UserError(f"{file}: the file is empty; remove it, or download it again")
    length, rest = divmod(size - offset, itemsize)
    if rest:
        raise UserError(
            f"{file}: {size} bytes are not a multiple of {token_dtype}'s {itemsize}; "
            "set data.token_dtype, or download the file again"
        )
    load = functools.partial(_memmap, file, token_dtype, offset, length)
    ends = None
    index = file.with_suffix(".idx")
    if index.exists():
        count, rest = divmod(index.stat().st_size, 8)
        ends = functools.partial(_memmap, index, "uint64", 0, count)
        if rest or not count or ends()[-1] != length:
            raise UserError(
                f"{index}: does not end at the {length} tokens of {file.name}; "
                "tokenize the text again"
            )
    trained, mask = None, file.with_suffix(TRAINED)
    if mask.exists():
        if mask.stat().st_size != length:
            raise UserError(
                f"{mask}: does not have a byte for each of the {length} tokens of "
                f"{file.name}; tokenize the chats again"
            )
        trained = functools.partial(_memmap, mask, "bool", 0, length)
    name = file.relative_to(folder).as_posix()
    return Piece(file, name, 0, length, load, ends, trained)


@functools.lru_cache(maxsize=256)
def _memmap(file: Path, dtype: str, offset: int, length: int) -> np.ndarray:
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r", offset, (length,))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror}); make it "
            "readable, or move it out of data.path"
        ) from error
