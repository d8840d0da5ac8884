"""Documents of text files and files of records as tokens."""

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jshard.data.text.records import (
    Slice,
    cut,
    has_records,
    read_records,
    read_texts,
)
from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.tokenizer import FileTokenizer, Tokenizer
from jshard.errors import UserError

TEXT_BYTES = 2**24  # longer texts are several documents, as tokenizing takes memory
_BATCH = 2**20  # characters tokenized at a time
_MUCH = 2**30  # bytes to tokenize at every start


class Encoded(NamedTuple):
    """The tokens of a file.

    Attributes:
      tokens: Unsigned [n].
      ends: The token after the last of each document, int64[documents].
      trained: Which tokens are targets, bool[n]; None for all.
    """

    tokens: np.ndarray
    ends: np.ndarray
    trained: np.ndarray | None = None


def encode_files(
    files: Sequence[Path], tokenizer: Tokenizer, text_key: str
) -> list[Encoded]:
    """Returns the tokens of text files and of files of records.

    A text file is a document; one of more than 16 MiB is cut at lines to several. The
    result is kept for the next call with the same unchanged files.

    Args:
      files: See above. Chats are records without `text_key`, but with "messages".
      tokenizer: Makes the tokens.
      text_key: The text of a record.
    """
    stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    size = sum(size for _, size in stamps)
    if size > _MUCH:
        warnings.warn(
            f"{files[0].parent}: every process tokenizes {size / 1e9:.1f} GB of text "
            "at every start and keeps it in memory; python -m jshard.tokenize does it "
            "once",
            stacklevel=2,
        )
    return _encode_files(tuple(files), tokenizer, text_key, stamps)


@functools.lru_cache(maxsize=16)  # for both splits, and the sources of a mixture
def _encode_files(
    files: Sequence[Path], tokenizer: Tokenizer, text_key: str, stamps: tuple
) -> list[Encoded]:
    del stamps  # part of the cache's key
    chats = {file for file in files if has_chats(file, text_key)}
    texts = [file for file in files if file not in chats]
    found = dict(zip(texts, _encode_texts(texts, tokenizer, text_key), strict=True))
    found |= {file: _encode_chats(file, tokenizer) for file in chats}
    return [found[file] for file in files]


def _encode_texts(
    files: Sequence[Path], tokenizer: Tokenizer, text_key: str
) -> list[Encoded]:
    documents: list[list[np.ndarray]] = [[] for _ in files]
    labelled = (
        (number, text)
        for number, file in enumerate(files)
        for part in cut(file, TEXT_BYTES)
        for text in read_texts(part, text_key)
    )
    for batch in _batches(labelled):
        numbers, texts = zip(*batch, strict=True)
        file = files[numbers[0]]
        for number, tokens in zip(numbers, encode(tokenizer, texts, file), strict=True):
            documents[number].append(tokens)
    return [_joined(tokens, tokenizer.dtype) for tokens in documents]


def encode_slices(
    parts: Iterable[Slice], tokenizer: Tokenizer, text_key: str
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields each document's tokens, and which are targets; None for all."""
    for part in parts:
        if has_chats(part.file, text_key):
            yield from _chats(part, tokenizer)
            continue
        texts = ((0, text) for text in read_texts(part, text_key))
        for batch in _batches(texts):
            for tokens in encode(tokenizer, [text for _, text in batch], part.file):
                yield tokens, None


def _batches(texts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Groups texts that are not empty to about a million characters."""
    batch, size = [], 0
    for labelled in texts:
        if labelled[1]:
            batch.append(labelled)
            size += len(labelled[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], file: Path
) -> Sequence[np.ndarray]:
    """Returns the tokens of documents; a UserError names `file`."""
    try:
        return tokenizer.encode_documents(texts)
    except UnicodeEncodeError as error:  # JSON can hold halves of characters
        raise UserError(
            f"{file}: has a text that is not valid Unicode ({error.reason})"
        ) from error


def _joined(documents: Sequence[np.ndarray], dtype: np.dtype) -> Encoded:
    tokens = np.concatenate(documents) if documents else np.zeros(0, dtype)
    return Encoded(tokens, np.cumsum([len(d) for d in documents], dtype=np.int64))


def has_chats(file: Path, text_key: str) -> bool:
    """Returns whether a file holds chats: whether its first record is one."""
    if not has_records(file):
        return False
    for part in itertools.islice(cut(file, TEXT_BYTES), 1):
        for _, record in read_records(part):
            return text_key not in record and "messages" in record
    return False


def _encode_chats(file: Path, tokenizer: Tokenizer) -> Encoded:
    found = [
        document
        for part in cut(file, TEXT_BYTES)
        for document in _chats(part, tokenizer)
    ]
    joined = _joined([tokens for tokens, _ in found], tokenizer.dtype)
    return joined._replace(trained=np.concatenate([trained for _, trained in found]))


def _chats(
    part: Slice, tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens of each chat of a slice, and which are targets."""
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"{part.file}: chats need the template of a tokenizer: set data.tokenizer "
            "to the model's folder"
        )
    chat = load_chat(tokenizer)
    for where, record in read_records(part):
        yield chat.encode(record, where)
