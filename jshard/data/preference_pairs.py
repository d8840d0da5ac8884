"""Pairs of answers of which one was preferred, in the forms that TRL reads."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jshard.checkpoint.untrusted import parse_json
from jshard.cli.paths import check_path
from jshard.data.text.corpus import VALIDATION_NAME, corpus_files
from jshard.data.text.named_dataset import load_splits
from jshard.data.text.records import cut, has_records, read_records
from jshard.data.tokenizers.chat import Chat, load_chat
from jshard.data.tokenizers.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from jshard.errors import UserError, some_of

_BYTES = 2**24  # of a file to read at a time
_ANSWERS = ("chosen", "rejected")


class Pair(NamedTuple):
    """The tokens of two answers to a prompt, [n] each.

    Attributes:
      prompt: What both begin with.
      chosen: The answer that was preferred, with its end.
      rejected: The other.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


def preference_data(
    path: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    tokenizer: str,
    vocab_size: int | None = None,
    validation_fraction: float = 0.05,
    dataset: str = "",
    config: str = "",
    train_split: str = "train",
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
      dataset: A dataset of Hugging Face in place of ``path``; its split "validation" is
        for validation.
      config: The dataset's configuration, if it has several.
      train_split: The dataset's split to train on.

    Returns:
      A dataset of {"inputs": int32[2 T], "targets": int32[2 T], "texts": bool[2 T],
      "answers": bool[2 T]}. Places of chosen and rejected text alternate, so that
      devices that share a sequence have the same part of both. ``texts`` says which
      targets are no padding, and ``answers`` which are an answer's.

    Raises:
      UserError: A record is no such pair, its answers are equal or empty, or its prompt
        leaves no room for them; or a file, a dataset or the tokenizer cannot be read.
    """
    if bool(path) == bool(dataset):
        raise UserError(
            "preferences are read from data.path, JSONL or Parquet with 'prompt', "
            "'chosen' and 'rejected', or from data.dataset; give one of them"
        )
    if dataset:
        pairs = _of_dataset(
            dataset, config, train_split, tokenizer, vocab_size, sequence_length
        )
    else:
        check_path("data.path", path, bucket=True, hub=True)
        files = tuple((x, name, x.stat().st_mtime_ns) for x, name in corpus_files(path))
        pairs = _of_files(files, tokenizer, vocab_size, sequence_length)
    own = pairs[split]
    if not pairs["validation"]:
        own = _cut_off(pairs["train"], split, validation_fraction)
    if not own:
        raise UserError(
            f"{path or dataset}: has no pairs for {split}; change "
            "data.validation_fraction, or set eval_every=0 to validate on none"
        )
    examples = grain.MapDataset.range(len(own)).map(
        lambda index: _example(own[index], sequence_length)
    )
    return (
        examples
        if split == "validation"
        else examples.seed(seed % 2**32).shuffle().repeat()
    )


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
    several = len(files) > 1
    for file, name, _ in files:
        if not has_records(file):
            raise UserError(
                f"{file}: preferences are records of JSONL, Parquet or Arrow; this is "
                "none by its name"
            )
        split = "validation" if several and VALIDATION_NAME.search(name) else "train"
        records[split] += [x for part in cut(file, _BYTES) for x in read_records(part)]
    return _encoded(records, tokenizer, vocab_size, T)


@functools.lru_cache(maxsize=4)
def _of_dataset(
    dataset: str,
    config: str,
    train_split: str,
    tokenizer: str,
    vocab_size: int | None,
    T: int,
) -> dict[str, list[Pair]]:
    splits = load_splits(dataset, config)
    if train_split not in splits:
        raise UserError(
            f"data.dataset={dataset}: has no split {train_split!r}; set data.split to "
            f"one of {some_of(sorted(splits))}"
        )
    names = {"train": train_split, "validation": "validation"}
    records = {
        split: [
            (f"data.dataset={dataset}: row {number} of {name}", record)
            for number, record in enumerate(splits[name].rows if name in splits else ())
        ]
        for split, name in names.items()
    }
    return _encoded(records, tokenizer, vocab_size, T)


def _encoded(
    records: Mapping[str, list], tokenizer: str, vocab_size: int | None, T: int
) -> dict[str, list[Pair]]:
    encode = _Encoder(load_tokenizer(tokenizer, vocab_size), vocab_size, T)
    pairs = {
        split: [encode(record, where) for where, record in of_split]
        for split, of_split in records.items()
    }
    if encode.problems:
        more = len(encode.problems) - 1
        also = f" ({more} more records cannot be used, either)" if more else ""
        raise UserError(f"{encode.problems[0]}{also}")
    return pairs


class _Encoder:
    """Makes pairs of records; what is wrong with them is in ``problems``."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None, T: int):
        self._tokenizer, self._limit, self._places = tokenizer, vocab_size, T
        self.problems: list[str] = []

    def __call__(self, record: Mapping[str, Any], where: str) -> Pair:
        prompt, chosen, rejected, is_chat = _parts(record, where)
        if is_chat:
            tools = _tools(record, where)
            chat = self._chat(where)
            write = functools.partial(chat.render, tools=tools, where=where)
            first = self._encode(write(prompt, add_generation_prompt=True), where, True)
            whole = [
                self._encode(write(prompt + x), where, True) for x in (chosen, rejected)
            ]
        else:
            first = self._encode(prompt, where, False)
            whole = [
                self._ended(self._encode(prompt + x, where, False))
                for x in (chosen, rejected)
            ]
        # Tokens may join the prompt's end to an answer; templates may write it anew.
        begin = min(_common_tokens(first, x) for x in whole)
        pair = Pair(first[:begin], *(x[begin:] for x in whole))
        self._check(pair, where, _is_empty(chosen) or _is_empty(rejected))
        return pair

    def _chat(self, where: str) -> Chat:
        if not isinstance(self._tokenizer, FileTokenizer):
            raise UserError(
                f"{where}: chats need the template of a tokenizer: set data.tokenizer "
                "to the model's folder"
            )
        return load_chat(self._tokenizer)

    def _encode(self, text: str, where: str, is_chat: bool) -> np.ndarray:
        more = {"special": False} if is_chat else {}
        try:
            return self._tokenizer.encode(text, **more)
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: not valid Unicode ({error.reason})") from error

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        end = self._tokenizer.eos_id
        if end is None or (len(tokens) and tokens[-1] == end):
            return tokens
        return np.append(tokens, np.int32(end))

    def _check(self, pair: Pair, where: str, empty: bool) -> None:
        T, prompt = self._places, len(pair.prompt)
        room = T + 1 - max(prompt, 1)  # the first token of a text is no target
        if empty:
            problem = "an answer is empty; remove the record"
        elif np.array_equal(pair.chosen, pair.rejected):
            problem = "'chosen' and 'rejected' are the same; remove the record"
        elif room < 1:
            problem = (
                f"the prompt has {prompt} tokens, which leaves no room for an answer "
                f"in data.sequence_length={T}; raise it, or remove the record"
            )
        elif np.array_equal(pair.chosen[:room], pair.rejected[:room]):
            problem = (
                f"the answers are the same up to data.sequence_length={T}, where they "
                "are cut; raise it, or remove the record"
            )
        elif self._limit and max(x.max(initial=0) for x in pair) >= self._limit:
            problem = (
                f"has a token of {self._limit} or more; raise model.vocab_size, or "
                "give the model's own tokenizer"
            )
        else:
            return
        self.problems.append(f"{where}: {problem}")


def _parts(record: Mapping[str, Any], where: str) -> tuple[Any, Any, Any, bool]:
    """Returns prompt, chosen and rejected, and whether they are chats, not texts."""
    for name in _ANSWERS:
        if name not in record:
            raise UserError(
                f"{where}: has no {name!r}, but {some_of(sorted(record)) or 'nothing'};"
                " a preference has 'chosen' and 'rejected', and maybe 'prompt'"
            )
    kinds = {name: _kind(record[name], name, where) for name in _ANSWERS}
    chosen, rejected = record["chosen"], record["rejected"]
    if kinds["chosen"] != kinds["rejected"]:
        raise UserError(
            f"{where}: 'chosen' is a {kinds['chosen']}, and 'rejected' is a "
            f"{kinds['rejected']}; give two texts, or two chats"
        )
    is_chat = kinds["chosen"] == "chat"
    prompt = record.get("prompt")
    if prompt is not None:
        kind = _kind(prompt, "prompt", where)
        if kind == kinds["chosen"]:
            return prompt, chosen, rejected, is_chat
        if kind == "chat":
            raise UserError(
                f"{where}: 'prompt' is a chat, and 'chosen' is a text; give the "
                "answers as messages"
            )
    # A prompt beside whole chats is in them, too.
    begin = _common(chosen, rejected)
    begin = min(begin, max(min(len(chosen), len(rejected)) - 1, 0))
    if not is_chat and chosen[begin - 1 : begin] == " ":
        begin -= 1  # the space belongs to the answers
    return chosen[:begin], chosen[begin:], rejected[begin:], is_chat


def _kind(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return "text"
    is_message = lambda x: isinstance(x, Mapping) and isinstance(x.get("role"), str)
    if isinstance(value, list) and all(map(is_message, value)):
        return "chat"
    raise UserError(
        f"{where}: {name!r} is neither a text nor a list of messages with roles, but a "
        f"{type(value).__name__}"
    )


def _tools(record: Mapping[str, Any], where: str) -> Any:
    """Returns the tools of a chat, which may be a text of JSON, or None."""
    tools = record.get("tools") or None
    try:
        return parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise UserError(f"{where}: 'tools' is not JSON: {error}") from error


def _is_empty(answer: Any) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    return not any(x.get("content") or x.get("tool_calls") for x in answer)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many items both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _example(pair: Pair, T: int) -> dict[str, np.ndarray]:
    example = {
        "inputs": np.zeros((T, 2), np.int32),
        "targets": np.zeros((T, 2), np.int32),
        "texts": np.zeros((T, 2), bool),
        "answers": np.zeros((T, 2), bool),
    }
    begin = max(len(pair.prompt) - 1, 0)
    for i, answer in enumerate((pair.chosen, pair.rejected)):
        tokens = np.concatenate([pair.prompt, answer])[: T + 1]
        stop = len(tokens) - 1
        example["inputs"][:stop, i] = tokens[:-1]
        example["targets"][:stop, i] = tokens[1:]
        example["texts"][:stop, i] = True
        example["answers"][begin:stop, i] = True
    return {name: x.reshape(-1) for name, x in example.items()}
