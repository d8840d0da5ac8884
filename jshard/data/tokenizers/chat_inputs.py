"""What a chat template reads of a record: its messages, its tools, its options."""

import re
from collections.abc import Mapping
from typing import Any

from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import parse_json

# Where messages have what was thought before an answer. Templates find it under the
# first two, whichever has it, as with transformers 5.24.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
OPTIONS = "chat_template_kwargs"  # TRL's name
_OWN = {"messages", "tools", "add_generation_prompt", "where"}


def messages_of(record: Mapping[str, Any], where: str) -> list[Any]:
    """Returns a record's messages, if it has some with roles."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: expected a list of messages under 'messages'; the record has "
            f"{some_of(sorted(record)) or 'nothing'}"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} has no 'role'")
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: no message has the role 'assistant' to train on")
    return messages


def inputs_of(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what a template reads of a record besides its messages.

    That are "tools", the functions that it describes, perhaps as JSON, or None; and
    what its "chat_template_kwargs" names.

    Raises:
      UserError: "tools" is a text that is no JSON, or the other no such object.
    """
    tools, options = record.get("tools") or None, record.get(OPTIONS) or {}
    if not isinstance(options, Mapping) or _OWN & options.keys():
        raise UserError(
            f"{where}: {OPTIONS!r} is {str(options)[:80]}; it must be an object of "
            f"what the template reads besides {some_of(sorted(_OWN - {'where'}))}"
        )
    try:
        tools = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise UserError(f"{where}: 'tools' is not JSON: {error}") from error
    return {"tools": tools, **options}


def as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates get it, with what was thought under its names."""
    found = {key: value for key, value in message.items() if value is not None}
    thoughts = [found[key] for key in _THOUGHTS if key in found]
    if thoughts:
        found = {"thinking": thoughts[0], **found, "reasoning_content": thoughts[0]}
    return found


def unread_thoughts(template: str) -> set[str]:
    """Returns the names of thoughts in messages under which a template reads none."""
    words = set(re.findall(r"\w+", template))
    return set() if words & {*_THOUGHTS[:2]} else {*_THOUGHTS} - words
