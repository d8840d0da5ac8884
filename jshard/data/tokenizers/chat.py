"""Chats as tokens, by the template of their tokenizer.

A template is a Jinja program that writes a conversation as one text. Its environment is
that of Hugging Face's transformers, so that it writes the same text here.
"""

import functools
import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard.data.tokenizers.chat_inputs import (
    as_read,
    inputs_of,
    messages_of,
    unread_thoughts,
)
from jshard.data.tokenizers.chat_template import Template, TemplateError
from jshard.data.tokenizers.named_tokens import CONFIG, read_json
from jshard.data.tokenizers.tokenizer import TEMPLATES, FileTokenizer, Tokenizer
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import read_text

_DEFAULT, _TOOLS = "default", "tool_use"


class Chat:
    """Writes chats as text and tokens.

    `where` is the template's file, for errors. Chats with tools are written by
    `with_tools`, if that is given.

    Attributes:
      digest: Differs between templates.
    """

    def __init__(
        self,
        tokenizer: FileTokenizer,
        template: str,
        where: str,
        with_tools: "Chat | None" = None,
    ):
        self.digest = hashlib.sha256(template.encode()).hexdigest()
        if with_tools is not None:
            self.digest += with_tools.digest
        self._tokenizer = tokenizer
        self._where = where
        self._with_tools = with_tools
        self._unread = unread_thoughts(template)
        # Text that no conversation holds, around what a template marks as generated.
        self._marks = (f"<{uuid.uuid4().hex}>", f"</{uuid.uuid4().hex}>")
        self._marked = re.search(r"{%[-+]?\s*generation\b", template) is not None
        try:
            self._template = Template(template, self._marks)
        except ImportError as error:
            raise UserError(
                f"{where}: chat templates need jinja2: pip install 'jshard[text]'"
            ) from error
        except TemplateError as error:
            raise UserError(f"{where}: not a Jinja template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        where: str = "chat",
        **options: Any,
    ) -> str:
        """Returns a conversation as text.

        Args:
          messages: With "role" and "content", and what else the template reads.
          tools: Functions that the model may call, as JSON schemas.
          add_generation_prompt: End with the beginning of an answer.
          where: What to call the conversation in an error.
          **options: What else the template reads, such as "enable_thinking".
        """
        if tools is not None and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                where=where,
                **options,
            )
        inputs = {"tools": tools, **options}
        text = self._render(messages, inputs, add_generation_prompt, where)
        return text.replace(self._marks[0], "").replace(self._marks[1], "")

    def encode(
        self, record: Mapping[str, Any], where: str, *, given: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns a conversation's tokens, and which of them an assistant wrote.

        Those are what a template puts between `{% generation %}` and
        `{% endgeneration %}`. Of other templates, they are what each answer adds to the
        text of the messages before it with a generation prompt, without spaces at its
        end: the answer and the token that ends it.

        Args:
          record: {"messages": [{"role": ..., "content": ...}, ...]}, perhaps "tools"
            and "chat_template_kwargs". A key of a message that is null counts as
            missing.
          where: What to call it in an error.
          given: How many of the first messages are no targets.

        Returns:
          Tokens, unsigned [n], and bool[n].

        Raises:
          UserError: It is not such a record, the template refuses it, or earlier
            messages look different once an answer follows, so that the answer's tokens
            are not known.
        """
        messages, inputs = messages_of(record, where), inputs_of(record, where)
        if inputs["tools"] is not None and self._with_tools is not None:
            return self._with_tools.encode(record, where, given=given)
        self._tell_of_unread(messages, where)
        text = self._render(messages, inputs, False, where)
        if self._marked:
            text, spans = self._split(text, where)
        else:
            spans = self._answers(messages, inputs, text, where)
        if given:
            roles = [message["role"] for message in messages]
            if len(spans) != roles.count("assistant"):
                raise UserError(
                    f"{where}: {self._where} does not mark one text per answer, so "
                    "which of them the prompt holds is not known; write the record as "
                    "'messages'"
                )
            spans = spans[roles[:given].count("assistant") :]
        try:
            tokens, offsets = self._tokenizer.encode_with_offsets(text)
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: not valid Unicode ({error.reason})") from error
        trained = np.zeros(len(tokens), bool)
        for start, stop in spans:
            # A token that begins earlier holds the answer's first characters, too.
            first = np.searchsorted(offsets[:, 1], start, "right")
            last = np.searchsorted(offsets[:, 0], stop, "left")
            trained[first:last] = start < stop
        return tokens.astype(self._tokenizer.dtype), trained

    def _tell_of_unread(
        self, messages: Sequence[Mapping[str, Any]], where: str
    ) -> None:
        """Tells, once each, of thoughts that the template does not write."""
        for key in sorted(self._unread):
            if any(isinstance(message.get(key), str) for message in messages):
                self._unread.discard(key)
                show(
                    f"{where}: {self._where} does not read {key!r} of messages, so it "
                    "is not trained on; rename it to what the template reads",
                    error=True,
                )

    def _answers(
        self, messages: list[Any], inputs: Mapping[str, Any], text: str, where: str
    ) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._answer(messages, inputs, text, number)
                if isinstance(span, str):
                    raise UserError(
                        f"{where}: which tokens answer {number + 1} has is not known, "
                        f"as {self._where} {span}; mark answers in it by "
                        "{% generation %} and {% endgeneration %}"
                    )
                spans.append(span)
        return spans

    def _answer(
        self, messages: list[Any], inputs: Mapping[str, Any], text: str, number: int
    ) -> tuple[int, int] | str:
        """Returns where an answer is in the text, or why that is not known."""
        try:
            before = self._write(messages[:number], inputs, True)
            after = self._write(messages[: number + 1], inputs, False)
        except TemplateError as error:
            return f"does not write the messages up to it alone ({error})"
        if not after.startswith(before):
            return "does not begin it with the generation prompt"
        after, end = after.rstrip(), self._tokenizer.special_tokens.get("eos_token", "")
        if end and not text.startswith(after):  # it may end the text, not the answer
            after = after.removesuffix(end).rstrip()
            if text[len(after) :].lstrip().startswith(end):
                return "writes the end of an answer differently when others follow"
        if not text.startswith(after):
            return "writes messages differently when others follow"
        return len(before), max(len(after), len(before))

    def _split(self, text: str, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Removes marks, and returns the text and the spans that they enclosed."""
        begin, end = self._marks
        plain, *parts = text.split(begin)
        spans = []
        if end in plain or any(part.count(end) != 1 for part in parts):
            raise UserError(
                f"{where}: {self._where} marks an answer within another, or writes a "
                "part of one"
            )
        for part in parts:
            answer, rest = part.split(end)
            spans.append((len(plain), len(plain) + len(answer)))
            plain += answer + rest
        return plain, spans

    def _render(
        self,
        messages: Sequence[Any],
        inputs: Mapping[str, Any],
        add_generation_prompt: bool,
        where: str,
    ) -> str:
        try:
            return self._write(messages, inputs, add_generation_prompt)
        except TemplateError as error:
            raise UserError(f"{where}: {self._where} refuses it: {error}") from error

    def _write(
        self,
        messages: Sequence[Any],
        inputs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        given = {
            "messages": [as_read(message) for message in messages],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(
            {**given, **self._tokenizer.special_tokens, **inputs}
        )


def load_chat(tokenizer: Tokenizer, where: str) -> Chat:
    """Returns a tokenizer's chat template, from `chat_template.jinja` or its config.

    `where` is the chat that needs it, for errors.

    Raises:
      UserError: There is none, it is not Jinja, or jinja2 is missing.
    """
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"{where}: chats need the template of a tokenizer: set data.tokenizer "
            "to the model's folder"
        )
    return _load_chat(tokenizer)


@functools.lru_cache(maxsize=8)
def _load_chat(tokenizer: FileTokenizer) -> Chat:
    folder = tokenizer.file.parent
    templates, where = _of_files(folder), str(folder / TEMPLATES[0])
    if not templates:
        templates, where = _of_config(folder), str(folder / CONFIG)
    if not templates:
        raise UserError(
            f"{folder}: has no chat template, neither {TEMPLATES[0]} nor in {CONFIG}; "
            "put the one of the model's chat version there"
        )
    with_tools = None
    if (template := templates.get(_TOOLS)) is not None:
        own = folder / (CONFIG if where.endswith(CONFIG) else TEMPLATES[1])
        with_tools = Chat(tokenizer, template, str(own))
    missing = f"its templates are {some_of(sorted(templates))}, none of them default"
    template = templates.get(_DEFAULT, f"{{{{ raise_exception({missing!r}) }}}}")
    return Chat(tokenizer, template, where, with_tools)


def _of_files(folder: Path) -> dict[str, str]:
    """Returns the templates that are files, by name."""
    found = {}
    for name, file in zip((_DEFAULT, _TOOLS), TEMPLATES, strict=True):
        try:
            found[name] = read_text(folder / file)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / file}: cannot be read: {error}") from error
    return found


def _of_config(folder: Path) -> dict[str, str]:
    """Returns the templates of a tokenizer_config.json, by name."""
    found = read_json(folder, [CONFIG]).get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, list):  # several, each with a name
        several = [each for each in found if isinstance(each, dict)]
        named = [(each.get("name"), each.get("template")) for each in several]
    else:
        named = list(found.items()) if isinstance(found, dict) else []
    return {
        name: template
        for name, template in named
        if isinstance(name, str) and isinstance(template, str)
    }
