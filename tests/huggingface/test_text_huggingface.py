"""Tokens and chats are those that transformers makes of the same files."""

from typing import Any

import numpy as np
import pytest

from jshard.data.tokenizers.chat import load_chat
from jshard.data.tokenizers.tokenizer import load_tokenizer
from small_tokenizer import CHATML, TEXT, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers", exc_type=ImportError)

LLAMA_2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + "
    "' [/INST]' }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
MARKED = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content | trim + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}
{{ tools | tojson(indent=2) }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CONTENTS = [
    ["What is the capital of France?", "Paris."],
    ["a 文字  ", " é\n\nñ ", "<b>'1234'</b>", "5.6 & 7"],
    ["", "x", " ", "\n y"],
]


def messages(contents):
    roles = ["user", "assistant"] * len(contents)
    pairs = zip(roles, contents, strict=False)
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.fixture(params=["chatml", "llama-2", "marked"])
def both(request, tmp_path):
    """The same folder, opened by jshard and by transformers."""
    template = {"chatml": CHATML, "llama-2": LLAMA_2, "marked": MARKED}[request.param]
    folder = make_tokenizer(tmp_path, begins=True, bos_token="<s>")
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return load_tokenizer(folder), theirs


def test_tokens_are_theirs(both):
    ours, theirs = both
    for text in (TEXT, "", " a", "é<|im_end|>文"):
        tokens = ours.encode(text)
        assert tokens.tolist() == theirs(text)["input_ids"]
        (document,) = ours.encode_documents([text])
        assert document.tolist() == [*tokens.tolist(), theirs.eos_token_id]
        expected = theirs.decode(tokens, skip_special_tokens=True)
        assert ours.decode(tokens) == expected
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("contents", CONTENTS)
def test_chats_are_theirs(both, contents):
    ours, theirs = both
    chat, turns = load_chat(ours, "here"), messages(contents)
    tools = [{"name": "f", "why": "<é>"}]
    several: Any = ({}, {"add_generation_prompt": True}, {"tools": tools})
    for options in several:
        text = theirs.apply_chat_template(turns, tokenize=False, **options)
        assert chat.render(turns, **options) == text
    tokens, trained = chat.encode({"messages": turns}, "here")
    found = theirs.apply_chat_template(turns, return_dict=True)
    assert tokens.tolist() == found["input_ids"]
    assert trained.any()
    assert not trained[:3].any()
    if "generation %}" in theirs.chat_template:
        found = theirs.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        np.testing.assert_array_equal(trained, found["assistant_masks"])
