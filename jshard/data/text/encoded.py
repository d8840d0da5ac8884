"""Documents of text files and files of records as tokens."""

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jshard.data.files.record_forms import has_records
from jshard.data.text.records import Slice, cut, read_records, read_texts
from jshard.data.text.token_files import Piece
from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.errors import UserError

TEXT_BYTES = 2**24  # longer texts are several documents, as tokenizing takes memory
_BATCH = 2**20  # characters tokenized at a time
_MUCH = 2**30  # bytes to tokenize at every start


class Document(NamedTuple):
    """The tokens of a document."""

    file: Path  # where it is from
    tokens: np.ndarray  # unsigned [n]
    trained: np.ndarray | None = None  # which tokens are targets, bool[n]; None for all


def encode_files(
    files: Sequence[Path], tokenizer: Tokenizer, text_key: str
) -> list[Piece]:
    """Returns the tokens of text files and of files of records that have some.

    A text file is a document; one of more than 16 MiB is cut at lines to several. The
    result is kept for the next call with the same unchanged files.

    Chats are records without `text_key`, but with "messages".
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
) -> list[Piece]:
    del stamps  # part of the cache's key
    parts = [part for file in files for part in cut(file, TEXT_BYTES)]
    documents = encode_slices(parts, tokenizer, text_key)
    of_files = itertools.groupby(documents, lambda document: document.file)
    pieces = [joined(file, [*of_file]) for file, of_file in of_files]
    return [piece for piece in pieces if len(piece)]


def joined(file: Path, documents: Sequence[Document]) -> Piece:
    """Returns the tokens of documents, all of chats or none, as those of one file."""
    tokens = np.concatenate([document.tokens for document in documents])
    ends = np.cumsum([len(document.tokens) for document in documents])
    masks = [x.trained for x in documents if x.trained is not None]
    trained = np.concatenate(masks) if masks else None
    return Piece(
        file,
        str(file),
        0,
        len(tokens),
        load=lambda: tokens,
        ends=(lambda: ends) if len(ends) > 1 else None,
        trained=None if trained is None else (lambda: trained),
    )


def encode_slices(
    parts: Iterable[Slice], tokenizer: Tokenizer, text_key: str
) -> Iterator[Document]:
    """Yields the documents of slices of files, those without text left out."""
    is_chat = lambda part: has_chats(part.file, text_key)
    for chats, group in itertools.groupby(parts, is_chat):
        if chats:
            for part in group:
                chat = load_chat(tokenizer, str(part.file))
                for where, record in read_records(part):
                    yield Document(part.file, *chat.encode(record, where))
            continue
        texts = ((x.file, text) for x in group for text in read_texts(x, text_key))
        for batch in _batches(texts):
            yield from _encode(tokenizer, batch)


def _batches(texts: Iterable[tuple[Path, str]]) -> Iterator[list[tuple[Path, str]]]:
    """Groups texts that are not empty to about a million characters."""
    batch, size = [], 0
    for file, text in texts:
        if text:
            batch.append((file, text))
            size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    tokenizer: Tokenizer, batch: Sequence[tuple[Path, str]]
) -> Iterator[Document]:
    files, texts = zip(*batch, strict=True)
    try:
        encoded = tokenizer.encode_documents(texts)
    except UnicodeEncodeError as error:  # JSON can hold halves of characters
        raise UserError(
            f"{files[0]}: has a text that is not valid Unicode ({error.reason})"
        ) from error
    yield from map(Document, files, encoded)


def has_chats(file: Path, text_key: str) -> bool:
    """Returns whether a file holds chats: whether its first record is one."""
    if not has_records(file):
        return False
    for part in itertools.islice(cut(file, TEXT_BYTES), 1):
        for _, record in read_records(part):
            return text_key not in record and "messages" in record
    return False
