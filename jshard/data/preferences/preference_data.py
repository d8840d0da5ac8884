"""Pairs of answers from files and from datasets of Hugging Face, laid out in rows."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jshard.data.files.noting import note
from jshard.data.files.record_forms import has_records
from jshard.data.files.split_names import named_splits
from jshard.data.iterables import Stream
from jshard.data.preferences.pair_encoding import Pair, PairEncoder, example_of
from jshard.data.text.corpus import corpus_files
from jshard.data.text.named_dataset import VALIDATION, NamedDataset
from jshard.data.text.records import cut, read_records
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError

_BYTES = 2**24  # of a file to read at a time
_SHOWN = 60  # characters of a row, in errors


def preference_data(
    path: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    tokenizer: str,
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
) -> grain.MapDataset:
    """Returns pairs of texts of T = sequence_length tokens, padded at their end.

    A record has "chosen" and "rejected", and maybe "prompt" and "tools". Answers are
    texts, or chats: lists of messages, which the tokenizer's template writes. Without a
    prompt of the same kind, it is what both answers begin with. Texts get the
    tokenizer's end. Tokens, and where the answers begin in them, are those of TRL's
    ``DPOTrainer``; longer answers are cut.

    All pairs are read and tokenized now, in every process, and kept in memory.

    Args:
      path: A file of records (see ``text_data``), or a folder of them; files that are
        named as validation data are.
      split: "train", which repeats forever in a new order each epoch, or "validation",
        which is finite and in order.
      sequence_length: T, places of an answer with its prompt.
      seed: Determines the order.
      tokenizer: As for ``text_data``.
      vocab_size: Tokens must be below it, if it is given.
      validation_fraction: How many of the pairs, the last ones, are for validation if
        none are named so.

    Returns:
      A dataset of {"inputs": int32[2 T], "targets": int32[2 T], "texts": bool[2 T],
      "answers": bool[2 T]}. Places of chosen and rejected text alternate, so that
      devices that share a sequence have the same part of both. ``texts`` says which
      targets are no padding, and ``answers`` which are an answer's.

    Raises:
      UserError: A record is no such pair, its answers are equal or empty, or its prompt
        leaves no room for them; or a file or the tokenizer cannot be read.
    """
    check_path("data.path", path, bucket=True, hub=True)
    files = tuple((x, name, x.stat().st_mtime_ns) for x, name in corpus_files(path))
    if len(files) > 1 and (said := str(named_splits([name for _, name, _ in files]))):
        note(f"{path}: {said}")
    pairs = _of_files(files, tokenizer, vocab_size, sequence_length)
    own = pairs[split]
    if not pairs["validation"]:
        own = _cut_off(pairs["train"], split, validation_fraction)
    if not own:
        raise UserError(
            f"{path}: has no pairs for {split}; change "
            "data.validation_fraction, or set eval_every=0 to validate on none"
        )
    return _examples(own, split, sequence_length, seed)


def named_preference_data(
    dataset: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    tokenizer: str,
    vocab_size: int | None = None,
    config: str = "",
    train_split: str = "train",
    validation_rows: int = 1000,
    shuffle_rows: int = 1000,
    kept: bool = False,
) -> Stream | grain.MapDataset | None:
    """Returns the pairs of a dataset of Hugging Face, like ``preference_data``.

    Each process streams and tokenizes its part, again and again. Pairs for validation
    are read at once and kept.

    Args:
      dataset: A name on the Hub, NAME@REVISION, or a folder of Parquet, JSONL or what
        else its ``load_dataset`` reads.
      split: "train" or "validation".
      sequence_length: T, places of an answer with its prompt.
      seed: Determines the order.
      tokenizer: As for ``text_data``.
      vocab_size: Tokens must be below it, if it is given.
      config: The dataset's configuration, if it has several.
      train_split: The dataset's split to train on.
      validation_rows: As for ``streamed_text``; 0 is none.
      shuffle_rows: The same.
      kept: Whether all pairs are read now and kept in memory, not streamed.

    Raises:
      UserError: As for ``preference_data``, where a row is read; or the dataset, its
        configuration or its split does not exist.
    """
    source = NamedDataset(dataset, config, train_split, validation_rows)
    T = sequence_length
    encode = PairEncoder(load_tokenizer(tokenizer, vocab_size), vocab_size, T)
    name = f"data.dataset={dataset}"

    def all_of(rows: Iterable[Mapping[str, Any]]) -> grain.MapDataset:
        records = ((f"{name}: row {i}", row) for i, row in enumerate(rows))
        pairs = _encoded(records, encode)
        if not pairs:
            raise UserError(f"{name}: has no pairs for {split}")
        return _examples(pairs, split, T, seed)

    if split == VALIDATION:
        return all_of(source.held_out()) if validation_rows else None
    if kept:
        return all_of(source.trained_part())

    def of_row(row: Mapping[str, Any]) -> dict[str, np.ndarray]:
        (pair,) = _encoded([(f"{name}: the row {str(row)[:_SHOWN]}...", row)], encode)
        return example_of(pair, T)

    return Stream(
        f"the dataset {dataset}{f', {config}' if config else ''}, split {train_split}",
        lambda part, parts: source.part(part, parts, shuffle_rows, seed).map(of_row),
        divides=True,
        repeat=True,
        fingerprint=source.fingerprint,
    )


def _examples(pairs: Sequence[Pair], split: str, T: int, seed: int) -> grain.MapDataset:
    examples = grain.MapDataset.range(len(pairs)).map(lambda i: example_of(pairs[i], T))
    if split == VALIDATION:
        return examples
    return examples.seed(seed % 2**32).shuffle().repeat()


def _encoded(
    records: Iterable[tuple[str, Mapping[str, Any]]], encode: PairEncoder
) -> list[Pair]:
    """Returns the pairs of records; a UserError that says how many are none."""
    found = [encode(record, where) for where, record in records]
    problems = [x for x in found if isinstance(x, str)]
    if problems:
        more = len(problems) - 1
        also = f" ({more} more records cannot be used, either)" if more else ""
        raise UserError(f"{problems[0]}{also}")
    return [x for x in found if isinstance(x, Pair)]


def _cut_off(pairs: list[Pair], split: str, fraction: float) -> list[Pair]:
    count = round(len(pairs) * fraction)
    if fraction > 0 and len(pairs) > 1:
        count = min(max(count, 1), len(pairs) - 1)
    boundary = len(pairs) - count
    return pairs[boundary:] if split == "validation" else pairs[:boundary]


@functools.lru_cache(maxsize=4)  # for both splits
def _of_files(
    files: Sequence[tuple], tokenizer: str, vocab_size: int | None, T: int
) -> dict[str, list[Pair]]:
    records: dict[str, list] = {"train": [], "validation": []}
    names = [name for _, name, _ in files]
    held_out: list[str] = []
    if len(files) > 1:
        splits = named_splits(names)
        names, held_out = splits.train + splits.validation, splits.validation
    for file, name, _ in files:
        if name not in names:
            continue
        if not has_records(file):
            raise UserError(
                f"{file}: preferences are records of JSONL, JSON, CSV, Parquet or "
                "Arrow; this is none by its name"
            )
        split = "validation" if name in held_out else "train"
        records[split] += [x for part in cut(file, _BYTES) for x in read_records(part)]
    encode = PairEncoder(load_tokenizer(tokenizer, vocab_size), vocab_size, T)
    pairs = _encoded([x for of_split in records.values() for x in of_split], encode)
    boundary = len(records["train"])
    return {"train": pairs[:boundary], "validation": pairs[boundary:]}
