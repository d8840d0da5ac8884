"""A record of two answers, in any form that TRL reads, as tokens and as an example."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.chat_inputs import inputs_of
from jshard.data.tokenizers.continued import common, with_end
from jshard.data.tokenizers.tokenizer import Tokenizer
from jshard.system.errors import UserError, some_of

_ANSWERS = ("chosen", "rejected")


class Pair(NamedTuple):
    """The tokens of two answers to a prompt, [n] each."""

    prompt: np.ndarray  # what both begin with
    chosen: np.ndarray  # the answer that was preferred, with its end
    rejected: np.ndarray  # the other


class PairEncoder:
    """Makes pairs of records.

    Tokens must be below `vocab_size`, if it is given; T is how many places an answer
    has with its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None, T: int):
        self._tokenizer, self._limit, self._places = tokenizer, vocab_size, T

    def __call__(self, record: Mapping[str, Any], where: str) -> Pair | str:
        """Returns the pair of a record, or why it cannot be used.

        Raises:
          UserError: It is no record of a pair.
        """
        prompt, chosen, rejected, is_chat = _parts(record, where)
        if is_chat:
            inputs, chat = inputs_of(record, where), load_chat(self._tokenizer, where)
            write = functools.partial(chat.render, where=where, **inputs)
            first = self._encode(write(prompt, add_generation_prompt=True), where, True)
            whole = [
                self._encode(write(prompt + x), where, True) for x in (chosen, rejected)
            ]
        else:
            first = self._encode(prompt, where, False)
            whole = [
                with_end(self._encode(prompt + x, where, False), self._tokenizer)
                for x in (chosen, rejected)
            ]
        # Tokens may join the prompt's end to an answer; templates may write it anew.
        begin = min(common(first, x) for x in whole)
        pair = Pair(first[:begin], *(x[begin:] for x in whole))
        problem = self._problem(pair, _is_empty(chosen) or _is_empty(rejected))
        return f"{where}: {problem}" if problem else pair

    def _encode(self, text: str, where: str, is_chat: bool) -> np.ndarray:
        more = {"special": False} if is_chat else {}
        try:
            return self._tokenizer.encode(text, **more)
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: not valid Unicode ({error.reason})") from error

    def _problem(self, pair: Pair, empty: bool) -> str:
        T, prompt = self._places, len(pair.prompt)
        room = T + 1 - max(prompt, 1)  # the first token of a text is no target
        if empty:
            return "an answer is empty; remove the record"
        if np.array_equal(pair.chosen, pair.rejected):
            return "'chosen' and 'rejected' are the same; remove the record"
        if room < 1:
            return (
                f"the prompt has {prompt} tokens, which leaves no room for an answer "
                f"in data.sequence_length={T}; raise it, or remove the record"
            )
        if np.array_equal(pair.chosen[:room], pair.rejected[:room]):
            return (
                f"the answers are the same up to data.sequence_length={T}, where they "
                "are cut; raise it, or remove the record"
            )
        if self._limit and max(x.max(initial=0) for x in pair) >= self._limit:
            return (
                f"has a token of {self._limit} or more; raise model.vocab_size, or "
                "give the model's own tokenizer"
            )
        return ""


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
    begin = common(chosen, rejected)
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


def _is_empty(answer: Any) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    return not any(x.get("content") or x.get("tool_calls") for x in answer)


def example_of(pair: Pair, T: int) -> dict[str, np.ndarray]:
    """Returns the arrays that ``preference_data`` describes."""
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
