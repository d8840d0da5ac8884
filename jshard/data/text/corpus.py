"""A corpus: files of text or tokens, and their training and validation splits."""

import contextlib
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from jshard.data.files.noting import note
from jshard.data.files.record_forms import has_records, with_records
from jshard.data.files.split_names import NamedSplits, named_splits
from jshard.data.files.token_forms import is_token_array
from jshard.data.files.walk import files_of, reading
from jshard.data.text.encoded import encode_files
from jshard.data.text.token_files import (
    TOKENS,
    Piece,
    is_of_tokens,
    map_tokens,
)
from jshard.data.tokenizers.byte_pieces import ByteTokenizer, PieceTokenizer
from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.storage.hub.online.download import data_path
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError, some_of, warn
from jshard.system.files.untrusted import POINTER, is_pointer

# Tests, tables and third-party code, and files that differ between installations of
# the same Python version.
_STDLIB_SKIP = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib"),
    *("lib2to3", "distutils", "turtledemo", "encodings", "pydoc_data", "__pycache__"),
    *("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py"),
)
_LOOKED_AT = 2**16  # tokens of the first file
_LONGEST_POINTER = 1024  # bytes; those of Git LFS have about 130
UNFINISHED = ".unfinished-tokens"  # the folder in which jshard.tokenize works


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
    tokenizer = tokenizer or ByteTokenizer()
    if path == "":
        return _split_stdlib(validation_fraction, tokenizer)
    check_path("data.path", path, bucket=True, hub=True)
    root = data_path(path)
    files, folder = _listed(root)
    kind, chosen = _of_one_kind(root, files)
    if kind == "tokens" and (folder / UNFINISHED).exists():
        raise UserError(f"{root}: jshard.tokenize has not finished here; run it again")
    texts, splits = {}, None
    if kind == "text":
        single = root.is_file()
        texts = {root: _single_text(root)} if single else dict(_texts(root, chosen))
        chosen = list(texts)
    if not root.is_file() and chosen:
        splits = named_splits([_name(x, folder) for x in chosen])
        note(_about(root, kind, files, chosen, splits))
        read = {*splits.train, *splits.validation}
        chosen = [x for x in chosen if _name(x, folder) in read]
    if kind == "tokens":
        pieces = [map_tokens(x, _name(x, folder), token_dtype) for x in chosen]
    elif kind == "records":
        pieces = _encoded(chosen, folder, tokenizer, text_key)
    else:
        read = {file: texts[file] for file in chosen}
        pieces = _text_pieces(read, folder, tokenizer, b"" if root.is_file() else b"\0")
    if not pieces:
        raise UserError(
            f"{root}: has no text and no {TOKENS} files; set data.path to a file or "
            "folder that has"
        )
    if isinstance(tokenizer, PieceTokenizer) and kind != "tokens":
        share = tokenizer.share_of_bytes(pieces[0].load()[:_LOOKED_AT])
        if share > 0.5:
            note(
                f"{root}: {share:.0%} of it is not in the tokenizer's vocabulary, and "
                "is spelled byte by byte, which makes long sequences; for a tokenizer "
                f"of this text: python -m jshard.tokenize {path} --vocab_size=8192 "
                "--output=TOKENIZER, then --config.data.tokenizer=TOKENIZER"
            )
    if splits and splits.validation:
        return _hold_out_files(pieces, splits.validation)
    if kind == "tokens" or len(pieces) == 1:
        return _hold_out_tail(pieces, validation_fraction)
    return _hold_out(pieces, validation_fraction)


def corpus_files(path: Path | str) -> list[tuple[Path, str]]:
    """Returns the files with text or records at a path, and their names there."""
    root = data_path(path)
    files, folder = _listed(root)
    kind, found = _of_one_kind(root, files)
    if kind == "tokens":
        raise UserError(f"{found[0]}: holds tokens already; give text or records")
    if kind == "text" and root.is_dir():
        found = [file for file, _ in _texts(root, found)]
    return [(file, _name(file, folder)) for file in found]


def _of_one_kind(root: Path, files: Sequence[Path]) -> tuple[str, list[Path]]:
    """Returns what is read at a path, "tokens", "records" or "text", and the files.

    Of a folder with tokens or records nothing else is read, and of one with text no
    tables, and no JSON that is not records.

    Raises:
      UserError: Git LFS has not fetched one of them.
    """
    if root.is_file():
        tokens = [x for x in files if is_of_tokens(x)]
        records = [x for x in files if has_records(x)]
    else:
        tokens = [x for x in files if x.suffix.lower() == TOKENS or is_token_array(x)]
        records = [] if tokens else with_records(files)
    kind, found = "text", [x for x in files if not has_records(x)]
    if tokens or records:
        kind, found = ("tokens", tokens) if tokens else ("records", records)
    for file in found:
        with contextlib.suppress(OSError):  # said where it is read
            if file.stat().st_size < _LONGEST_POINTER and is_pointer(file):
                raise UserError(f"{file}: {POINTER}")
    return kind, found


def _about(
    root: Path,
    kind: str,
    files: Sequence[Path],
    chosen: Sequence[Path],
    splits: NamedSplits,
) -> str:
    """Says what the files of a folder are taken for."""
    text = f"{root}: {len(chosen)} file{'s' * (len(chosen) > 1)} of {kind}"
    if others := [_name(x, root) for x in sorted({*files} - {*chosen})]:
        text += f", and {len(others)} that are not read ({some_of(others, limit=3)})"
    return "; ".join(filter(None, (text, str(splits))))


def _split_stdlib(fraction: float, tokenizer: Tokenizer) -> dict[str, list[Piece]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _files(root, _STDLIB_SKIP) if file.suffix == ".py"]
    if not files:  # an interpreter with a compiled or zipped library
        raise UserError(
            f"{root}: has no source of Python's standard library, the default "
            "text; set data.path to a text file or folder"
        )
    pieces = _text_pieces(dict(_texts(root, files)), root, tokenizer)
    return _hold_out_files(pieces, [x.name for x in _chosen(pieces, fraction)])


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


def _hold_out(pieces: Sequence[Piece], fraction: float) -> dict[str, list[Piece]]:
    """Holds out whole files, or, if that is far more than asked for, the last tokens.

    So are two shards of records divided at a record, and neither is lost.
    """
    chosen = _chosen(pieces, fraction)
    tokens, total = (sum(map(len, x)) for x in (chosen, pieces))
    if tokens > 2 * fraction * total:
        return _hold_out_tail(pieces, fraction)
    return _hold_out_files(pieces, [piece.name for piece in chosen])


def _hold_out_files(
    pieces: Sequence[Piece], names: Sequence[str]
) -> dict[str, list[Piece]]:
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


def _listed(root: Path) -> tuple[list[Path], Path]:
    """Returns the file or the files of a folder, and the folder that names them."""
    if not os.path.exists(root):  # Path.exists raises if a parent is not readable
        raise UserError(
            f"{root}: no such file or folder; set data.path to a text file, a .bin "
            "file of tokens, JSONL, Parquet, or a folder of these ('' is a built-in "
            "text)"
        )
    return ([root], root.parent) if root.is_file() else (_files(root), root)


def _files(root: Path, skip: Sequence[str] = ()) -> list[Path]:
    """Returns all files under `root`, sorted, without hidden and skipped names."""
    with reading(root):
        names = files_of(root, lambda name: any(fnmatch(name, s) for s in skip))
        found = sorted(map(Path, names))
    for file in found:  # a pipe or a device may never end
        if os.path.exists(file) and not os.path.isfile(file):
            raise UserError(f"{file}: not a regular file; move it out of data.path")
    return found


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _texts(root: Path, files: Sequence[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yields the files that are text, and what they hold; warns of others."""
    binary = []
    for file in files:
        with reading(file):
            data = file.read_bytes()
        if _not_text(data):
            binary.append(file)
        elif data:
            yield file, data
    if binary:
        warn(
            f"{root}: skipped {len(binary)} of {len(files)} files that are not UTF-8 "
            f"text; the first is {binary[0]}"
        )


def _single_text(file: Path) -> bytes:
    with reading(file):
        data = file.read_bytes()
    if not data:
        raise UserError(f"{file}: the file is empty; set data.path to one with text")
    if reason := _not_text(data):
        raise UserError(
            f"{file}: not UTF-8 text ({reason}); convert it, or rename a file of "
            f"tokens to {TOKENS}"
        )
    return data


def _not_text(data: bytes) -> str:
    """Returns why these bytes are not text, or ""."""
    if (position := data.find(0)) >= 0:
        return f"a zero byte at {position}"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} at byte {error.start}"
    return ""


def _text_pieces(
    texts: Mapping[Path, bytes], folder: Path, tokenizer: Tokenizer, end: bytes = b"\0"
) -> list[Piece]:
    """Returns the tokens of text files; as bytes, each ends with `end`."""
    if type(tokenizer) is not ByteTokenizer:
        return _encoded(list(texts), folder, tokenizer)
    tokens = {file: np.frombuffer(x + end, np.uint8) for file, x in texts.items()}
    return [
        Piece(file, _name(file, folder), 0, len(x), lambda x=x: x)
        for file, x in tokens.items()
    ]


def _encoded(
    files: Sequence[Path], folder: Path, tokenizer: Tokenizer, text_key: str = "text"
) -> list[Piece]:
    pieces = encode_files(files, tokenizer, text_key)
    return [dataclasses.replace(x, name=_name(x.file, folder)) for x in pieces]
