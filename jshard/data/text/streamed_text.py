"""Text of Hugging Face's datasets, tokenized and laid out while it is streamed."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from grain.experimental import (
    BestFitPackIterDataset,
    ConcatThenSplitIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
)

from jshard.data.files.conversations import (
    FORMS,
    SAID,
    form_of_record,
    is_pair_of_texts,
)
from jshard.data.files.noting import note
from jshard.data.iterables import Stream, part_of
from jshard.data.mixture import is_mixture, mix, parse_mixture
from jshard.data.text.encoded import Document, encode_record, joined
from jshard.data.text.named_dataset import VALIDATION, NamedDataset, Used
from jshard.data.text.packing import packed_rows
from jshard.data.text.windows import windows
from jshard.data.tokenizers.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from jshard.system.errors import UserError, some_of

_BINS = 64  # rows that are packed at a time


def streamed_text(
    dataset: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    config: str = "",
    train_split: str = "train",
    validation_rows: int = 1000,
    shuffle_rows: int = 1000,
    vocab_size: int | None = None,
    tokenizer: str = "",
    text_key: str = "text",
    pack: bool = False,
    max_segments: int = 0,
    all_tokens: bool = False,
) -> Stream | grain.MapDataset | None:
    """Returns windows or packed rows of T = sequence_length tokens, like `text_data`.

    Each process streams and tokenizes its files (see `part_of`), again and again, with
    the files in another order from the second epoch on. Rows for validation are read
    at once and kept.

    Args:
      dataset: The name of a dataset of Hugging Face, NAME@REVISION, or a folder of
        Parquet, JSONL, WebDataset or what else its `load_dataset` reads; or several
        by weight, "NAME:WEIGHT,NAME:WEIGHT".
      split: "train", a `Stream`, or "validation".
      sequence_length: T, in tokens.
      seed: Determines the order.
      config: The dataset's configuration, if it has several.
      train_split: The dataset's split to train on.
      validation_rows: How many rows to validate on, of the split "validation"; if the
        dataset has none, the first ones of its first file, which are not trained on. 0
        is none.
      shuffle_rows: How many rows to read, and then to shuffle, at a time; 0 keeps the
        order. A run that resumes reads at most so many again.
      vocab_size: The tokenizer must not have more tokens.
      tokenizer: As for `text_data`.
      text_key: The column of the text; rows without it can be chats or pairs.
      pack: Whether to pack whole documents, by best fit among 64 rows.
      max_segments: As for `text_data`.
      all_tokens: As for `text_data`.

    Raises:
      UserError: The dataset, its configuration, split or column does not exist, or an
        argument is invalid.
    """
    weights = {dataset: 1.0}
    if is_mixture(dataset):
        weights = parse_mixture(dataset, "data.dataset")
    loaded = load_tokenizer(tokenizer, vocab_size)
    encode = _Encoder(loaded, text_key, pack, all_tokens)
    sources = {
        name: NamedDataset(name, config, train_split, validation_rows)
        for name in weights
    }
    for name, source in sources.items():
        _check_columns(name, source.rows, text_key)
    T = sequence_length
    if split == VALIDATION:
        if not validation_rows:
            return None
        made = {}
        for name, source in sources.items():
            documents = list(itertools.chain(*map(encode, source.held_out())))
            if sum(len(x.tokens) for x in documents) < 2:
                raise UserError(f"data.dataset={name}: has no text for validation")
            pieces = [joined(Path(name), documents)]
            if pack:
                made[name] = packed_rows(
                    pieces, T, max_segments=max_segments, vocab_size=vocab_size
                )
            else:
                made[name] = windows(pieces, T, pad=True, vocab_size=vocab_size)
        return mix(made, weights)

    def of_part(source: NamedDataset, part: int, parts: int) -> grain.IterDataset:
        used = Used()
        read = source.part(part, parts, shuffle_rows, seed, used)
        places = _Places(encode, T if pack else 0, source.name, used)
        documents = FlatMapIterDataset(read, places)
        return _packed(documents, T, max_segments) if pack else _cut(documents, T)

    def open_part(part: int, parts: int) -> grain.IterDataset:
        read = [of_part(source, part, parts) for source in sources.values()]
        return grain.IterDataset.mix(read, list(weights.values()))

    about = f"{dataset}{f', {config}' if config else ''}, split {train_split}"
    return Stream(
        f"the dataset {about}",
        open_part,
        divides=True,
        repeat=True,
        fingerprint={k: v for x in sources.values() for k, v in x.fingerprint.items()},
    )


def _check_columns(name: str, rows: Any, text_key: str) -> None:
    columns = rows.column_names or next(iter(part_of(rows, 0, 1)), {})
    if text_key in columns:
        return
    if not (form := form_of_record(columns, text_key)):
        raise UserError(
            f"data.dataset={name}: has no column {text_key!r}; set data.text_key to "
            f"one of {some_of(list(map(str, columns)))}, or give it the columns of "
            f"{FORMS}"
        )
    note(f"data.dataset={name}: {SAID[form]}")


class _Encoder:
    """Makes documents of a row: none, if its text is empty, or one."""

    def __init__(
        self, tokenizer: Tokenizer, text_key: str, pack: bool, all_tokens: bool
    ):
        self.tokenizer = tokenizer
        self._text_key, self._pack = text_key, pack
        self._all_tokens = all_tokens

    def __call__(self, row: Mapping[str, Any]) -> list[Document]:
        text = row.get(self._text_key)
        if text is None and (form := form_of_record(row, "")):
            return [self._conversation(row, form)]
        if not isinstance(text, str):
            raise UserError(
                f"data.dataset: {self._text_key!r} of a row is a "
                f"{type(text).__name__}, not a text; set data.text_key to one of "
                f"{some_of(sorted(row))}"
            )
        if not text:
            return []
        return [Document(Path(), self.tokenizer.encode_documents([text])[0])]

    def _conversation(self, row: Mapping[str, Any], form: str) -> Document:
        pair = is_pair_of_texts(row, form)
        if not self._pack or not (pair or isinstance(self.tokenizer, FileTokenizer)):
            what = "pairs" if pair else "chats"
            also = "" if pair else ", and data.tokenizer to the model's folder"
            raise UserError(
                f"data.dataset: {what} are packed as whole documents: set "
                f"data.pack=True{also}"
            )
        document = encode_record(row, form, self.tokenizer, "data.dataset, a row")
        return document._replace(trained=None) if self._all_tokens else document


class _Places(FlatMapTransform):
    """Makes what is packed of a row: tokens, or the places of at most T of them."""

    def __init__(self, encode: _Encoder, T: int, name: str, used: Used):
        self._encode, self._T, self._name, self._used = encode, T, name, used

    def flat_map(self, element: Any) -> list[dict[str, np.ndarray]]:
        found = self._places(self._encode(element))
        self._used.gave(self._name, len(found))
        return found

    def _places(self, documents: list[Document]) -> list[dict[str, np.ndarray]]:
        if not self._T:
            return [{"tokens": x.tokens.astype(np.int32)} for x in documents]
        found = []
        for document in documents:
            tokens = document.tokens.astype(np.int32)
            trained = document.trained
            weights = np.ones(len(tokens)) if trained is None else np.asarray(trained)
            all_places = {
                "inputs": tokens[:-1],
                "targets": tokens[1:],
                "weights": weights[1:].astype(np.float32),
            }
            for first in range(0, len(tokens) - 1, self._T):
                some = slice(first, first + self._T)
                found.append({name: x[some] for name, x in all_places.items()})
        return found


def _packed(
    documents: grain.IterDataset, T: int, max_segments: int
) -> grain.IterDataset:
    rows = BestFitPackIterDataset(
        documents,
        length_struct={"inputs": T, "targets": T, "weights": T},
        num_packing_bins=_BINS,
        max_sequences_per_bin=max(max_segments - 1, 0) or None,
    )
    return rows.map(
        lambda row: {
            "inputs": row["inputs"],
            "targets": row["targets"],
            "weights": row["weights"],
            "segment_ids": row["inputs_segment_ids"].astype(np.int32),
            "positions": row["inputs_positions"].astype(np.int32),
        }
    )


def _cut(documents: grain.IterDataset, T: int) -> grain.IterDataset:
    """Returns windows of T+1 tokens, one after the other, across documents."""
    rows = ConcatThenSplitIterDataset(documents, length_struct={"tokens": T + 1})
    return rows.map(
        lambda row: {
            "inputs": row["tokens"][:-1],
            "targets": row["tokens"][1:],
            "weights": np.ones(T, np.float32),
        }
    )
