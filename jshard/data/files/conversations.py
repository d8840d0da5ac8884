"""Which form a record has, by its keys: a text, or what others call a conversation.

The forms are those that TRL, Axolotl and LLaMA-Factory read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jshard.system.errors import UserError, some_of

# The forms, and what is said of a file that has one; a text has none.
MESSAGES, SHAREGPT, ALPACA, PAIR = "messages", "conversations", "instruction", "prompt"
SAID = {
    MESSAGES: "chats ('messages'), trained on the answers",
    SHAREGPT: "ShareGPT's chats ('conversations'), trained on the answers",
    ALPACA: "Alpaca's records, as chats of the user's 'instruction' and 'input', one "
    "below the other, and the 'output', which is trained on",
    PAIR: "pairs of 'prompt' and 'completion', which is trained on",
}
# How errors name them.
FORMS = (
    "'messages', 'conversations', 'instruction' and 'output', or 'prompt' and "
    "'completion'"
)
_NEEDED = {
    MESSAGES: (MESSAGES,),
    SHAREGPT: (SHAREGPT,),
    ALPACA: (ALPACA, "output"),
    PAIR: (PAIR, "completion"),
}
_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool"},
}


def form_of_record(keys: Sequence[str] | Mapping[str, Any], text_key: str) -> str:
    """Returns one of the forms, or "" for a text; ``text_key`` goes before all."""
    if text_key in keys:
        return ""
    forms = (form for form, needed in _NEEDED.items() if all(k in keys for k in needed))
    return next(forms, "")


class Conversation(NamedTuple):
    """A record as a chat.

    Attributes:
      chat: "messages", and perhaps "tools" and "chat_template_kwargs".
      given: How many of its messages are a prompt, whose answers are not trained on.
    """

    chat: Mapping[str, Any]
    given: int = 0


def as_chat(record: Mapping[str, Any], form: str, where: str) -> Conversation:
    """Returns a record of a form as a chat; ``where`` is its name in an error.

    Raises:
      UserError: The record has another form, or a role or a field that is not known.
    """
    _check_keys(record, form, where)
    given = 0
    if form == MESSAGES:
        return Conversation(record)
    if form == SHAREGPT:
        messages = [_of_turn(turn, where) for turn in _listed(record, form, where)]
    elif form == ALPACA:
        messages = _of_alpaca(record, where)
    else:
        messages = [x for key in _NEEDED[PAIR] for x in _listed(record, key, where)]
        given = len(record[PAIR])
    system = record.get("system")
    if system and form in (SHAREGPT, ALPACA):
        messages.insert(
            0, {"role": "system", "content": _text(record, "system", where)}
        )
    more = {key: record.get(key) for key in ("tools", "chat_template_kwargs")}
    return Conversation({"messages": messages, **more}, given)


def _check_keys(record: Mapping[str, Any], form: str, where: str) -> None:
    """Raises UserError for a record that lacks what the first record's form needs."""
    if missing := [key for key in _NEEDED[form] if key not in record]:
        raise UserError(
            f"{where}: has no {missing[0]!r}, as the first record has, but "
            f"{some_of(sorted(record)) or 'nothing'}; give all records one form"
        )


def is_pair_of_texts(record: Mapping[str, Any], form: str) -> bool:
    """Whether a record is a prompt and a completion that no template writes."""
    return form == PAIR and all(isinstance(record.get(x), str) for x in _NEEDED[PAIR])


def _of_turn(turn: Any, where: str) -> Mapping[str, Any]:
    """Returns a turn of ShareGPT's, or one that is a message, as a message."""
    if not isinstance(turn, Mapping):
        raise UserError(f"{where}: a turn is a {type(turn).__name__}, not an object")
    if "role" in turn:
        return turn
    role, text = turn.get("from"), turn.get("value")
    if role not in _ROLES:
        raise UserError(
            f"{where}: a turn is from {role!r}, and known are "
            f"{some_of(sorted(_ROLES))}; write such records as 'messages' with roles "
            "that the template knows"
        )
    if not isinstance(text, str):
        raise UserError(
            f"{where}: the 'value' of a turn is a {type(text).__name__}, not a text"
        )
    return {"role": _ROLES[role], "content": text}


def _of_alpaca(record: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Returns the messages of an instruction, as LLaMA-Factory makes them."""
    messages = []
    for pair in record.get("history") or ():
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise UserError(f"{where}: 'history' is not a list of pairs of texts")
        roles = ("user", "assistant")
        messages += [
            {"role": r, "content": x} for r, x in zip(roles, pair, strict=True)
        ]
    parts = [_text(record, ALPACA, where)]
    if record.get("input"):
        parts.append(_text(record, "input", where))
    answer = _text(record, "output", where)
    messages.append({"role": "user", "content": "\n".join(parts)})
    return [*messages, {"role": "assistant", "content": answer}]


def _listed(record: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    found = record[key]
    if not isinstance(found, list):
        raise UserError(
            f"{where}: {key!r} is a {type(found).__name__}, not a list of messages"
        )
    if not found:
        raise UserError(f"{where}: {key!r} is empty; remove the record")
    return found


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} is a {type(text).__name__}, not a text")
    return text
