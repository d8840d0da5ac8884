"""Documents of text files and files of records as tokens."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.data.files.conversations import (
    PAIR,
    SAID,
    as_chat,
    form_of_record,
    is_pair_of_texts,
)
from jshard.data.files.noting import note
from jshard.data.files.record_forms import has_records
from jshard.data.text.records import Slice, cut, read_records, read_texts
from jshard.data.text.token_files import Piece
from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.continued import common, with_end
from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.system.errors import UserError, warn

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

    Chats are records without `text_key`, in a form of `conversations`.
    """
    for file, form in ((file, conversation_form(file, text_key)) for file in files):
        if form:
            note(f"{file}: {SAID[form]}")
    stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    size = sum(size for _, size in stamps)
    if size > _MUCH:
        warn(
            f"{files[0].parent}: every process tokenizes {size / 1e9:.1f} GB of text "
            "at every start and keeps it in memory; python -m jshard.tokenize does it "
            "once"
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
    of_part = lambda part: conversation_form(part.file, text_key)
    for form, group in itertools.groupby(parts, of_part):
        if form:
            for part in group:
                for where, record in read_records(part):
                    encoded = encode_record(record, form, tokenizer, where)
                    yield encoded._replace(file=part.file)
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


def texts_of(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """Yields the texts of files, and of conversations those of their messages."""
    for file in files:
        form = conversation_form(file, text_key)
        for part in cut(file, TEXT_BYTES):
            if not form:
                yield from read_texts(part, text_key)
                continue
            for where, record in read_records(part):
                if is_pair_of_texts(record, form):
                    yield record[PAIR] + record["completion"]
                    continue
                messages = as_chat(record, form, where).chat["messages"]
                contents = (message.get("content") for message in messages)
                yield from (text for text in contents if isinstance(text, str))


def encode_record(
    record: Mapping[str, Any], form: str, tokenizer: Tokenizer, where: str
) -> Document:
    """Returns the document of a conversation or a pair; ``where`` names it in errors.

    A pair of texts is what TRL's ``SFTTrainer`` makes of it: no template, the
    tokenizer's end after the completion, and only the completion is a target.
    """
    if not is_pair_of_texts(record, form):
        chat, given = as_chat(record, form, where)
        encoded = load_chat(tokenizer, where).encode(chat, where, given=given)
        return Document(Path(), *encoded)
    texts = record[PAIR], record[PAIR] + record["completion"]
    try:
        prompt, tokens = map(tokenizer.encode, texts)
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid Unicode ({error.reason})") from error
    tokens = with_end(tokens, tokenizer)
    # A token may join the prompt's end to the completion, and belongs to the latter.
    trained = np.arange(len(tokens)) >= common(prompt, tokens)
    return Document(Path(), tokens.astype(tokenizer.dtype), trained)


def conversation_form(file: Path, text_key: str) -> str:
    """Returns the form of a file's first record, or "" for a text."""
    if not has_records(file):
        return ""
    for part in itertools.islice(cut(file, TEXT_BYTES), 1):
        for _, record in read_records(part):
            return form_of_record(record, text_key)
    return ""
