"""Chats as training data: their text, their tokens, and those of answers."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.errors import UserError
from jshard.training.chat import load_chat
from jshard.training.data.token_files import write_token_files
from jshard.training.tokenizer import load_tokenizer
from small_tokenizer import CHATML, make_tokenizer
from texts import text, window

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

MARKED = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}assistant: "
    "{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
# Drops what was thought in earlier answers, as Qwen 3 does.
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}\n{% endfor %}"
)


def talk(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    first = [] if system is None else [{"role": "system", "content": system}]
    turns = [
        {"role": role, "content": content}
        for role, content in zip(roles, contents, strict=False)
    ]
    return {"messages": first + turns}


CAPITALS = talk("The capital of France?", "Paris.", "And 文字?", " é, it is ")


@pytest.fixture
def chat(tmp_path):
    def make(template, **config):
        folder = make_tokenizer(tmp_path / "tokenizer", **config)
        (folder / "chat_template.jinja").write_text(template)
        return load_chat(load_tokenizer(folder))

    load_tokenizer.__globals__["_load"].cache_clear()
    return make


def answers(chat, record):
    """The text of each run of tokens to train on."""
    tokens, trained = chat.encode(record, "here")
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False))
    decode = chat._tokenizer._tokenizer.decode
    return [
        decode(tokens[a:b].tolist(), skip_special_tokens=False)
        for a, b in edges.reshape(-1, 2)
    ]


def test_answers_and_their_ends_are_trained_on(chat):
    chatml = chat(CHATML)
    rendered = chatml.render(CAPITALS["messages"])
    assert rendered.startswith("<|im_start|>user\nThe capital of France?<|im_end|>\n")
    assert answers(chatml, CAPITALS) == ["Paris.<|im_end|>", " é, it is <|im_end|>"]
    tokens, trained = chatml.encode(CAPITALS, "here")
    assert len(tokens) == len(trained)
    whole = chatml._tokenizer.encode(rendered, special=False)
    np.testing.assert_array_equal(tokens, whole)
    asked = chatml.render(CAPITALS["messages"][:1], add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n")


def test_a_template_may_mark_answers(chat):
    marked = chat(MARKED, bos_token="<s>")
    assert marked.render(CAPITALS["messages"]).startswith("<s>user: The capital")
    # Tokens that hold a space before the answer, too.
    expected = [" Paris.<|endoftext|>", " é, it is<|endoftext|>"]
    assert answers(marked, CAPITALS) == expected


def test_templates_of_tokenizer_config(tmp_path):
    named = [("tools", "x"), ("default", CHATML)]
    several = [{"name": name, "template": template} for name, template in named]
    for number, found in enumerate((CHATML, several)):
        folder = make_tokenizer(tmp_path / str(number), chat_template=found)
        chat = load_chat(load_tokenizer(folder))
        assert answers(chat, CAPITALS)[0] == "Paris.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (CHATML, {"messages": []}, "expected a list of messages under 'messages'"),
        (CHATML, {"text": "a"}, "expected a list of messages .* the record has text"),
        (CHATML, {"messages": ["a"]}, "message 1 has no 'role'"),
        (CHATML, talk("question"), "no message has the role 'assistant'"),
        (CHATML, {"messages": [{"role": "assistant"}]}, "jinja refuses it: .*content"),
        ("{{ raise_exception('odd roles') }}", CAPITALS, "refuses it: odd roles"),
        ("{{ messages.append(1) }}", CAPITALS, "refuses it: .*(unsafe|not safely)"),
        (CHATML, talk("a", "\ud800"), "here: not valid Unicode"),
        ("{% if %}", CAPITALS, "chat_template.jinja: not a Jinja template"),
        (FORGETFUL, talk("a", "<think>b</think>c", "d", "e"), "which tokens answer 2"),
    ],
)
def test_a_bad_chat_is_one_line(chat, template, record, message):
    with pytest.raises(UserError, match=message):
        chat(template).encode(record, "here")


def test_a_missing_template_is_one_line(tmp_path, monkeypatch):
    folder = make_tokenizer(tmp_path / "bare")
    with pytest.raises(UserError, match="bare: has no chat template, neither"):
        load_chat(load_tokenizer(folder))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(UserError, match=r"need jinja2: pip install 'jshard\[text\]'"):
        load_chat(load_tokenizer(folder))


def test_chats_are_packed_and_only_answers_count(chat, tmp_path):
    chat(CHATML)
    records = [talk(f"Question {i}?", f"Answer {i}.") for i in range(12)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = str(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"set --config\.data\.pack=True"):
        text(file, tokenizer=folder)
    with pytest.raises(UserError, match="chats need the template of a tokenizer"):
        text(file, pack=True)
    data = text(
        file, tokenizer=folder, pack=True, sequence_length=100, validation_fraction=0
    )
    row = window(data, 0)
    tokenizer = load_tokenizer(folder)
    trained_on = tokenizer.decode(row["targets"][row["weights"] > 0])
    assert trained_on.startswith("Answer ")
    assert trained_on.count("Answer") == row["segment_ids"].max() >= 2
    assert "Question" not in trained_on
    assert row["targets"][row["weights"] > 0][-1] == 3  # the end of an answer


def test_token_files_hold_the_chats_and_what_is_trained_on(chat, tmp_path, capsys):
    chat(CHATML)
    records = [talk(f"Question {i}?", f"Answer {i}.") for i in range(40)]
    corpus, folder = tmp_path / "corpus", str(tmp_path / "tokenizer")
    corpus.mkdir()
    chats = "".join(json.dumps(record) + "\n" for record in records)
    (corpus / "chats.jsonl").write_text(chats)
    (corpus / "texts.jsonl").write_text('{"text": "All of this counts."}\n')
    output = tmp_path / "tokens"
    write_token_files([corpus], Path(folder), output, part_bytes=2000)
    assert "--config.data.pack=True" in capsys.readouterr().out
    assert len(list(output.glob("*.trained"))) > 1
    options: Any = {"tokenizer": folder, "pack": True, "validation_fraction": 0}
    seen = []
    for path in (output, corpus):
        data = text(path, sequence_length=40, **options)
        rows = [window(data, i) for i in range(80)]
        seen.append({tuple(row["targets"][row["weights"] > 0]) for row in rows})
    assert seen[0] == seen[1]
    with pytest.raises(UserError, match=r"set --config\.data\.pack=True"):
        text(output, tokenizer=folder)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(MARKED)
    load_chat.cache_clear()
    with pytest.raises(UserError, match="made with another chat_template"):
        write_token_files([corpus], Path(folder), output, part_bytes=2000)
    next(output.glob("*.trained")).write_bytes(b"1")
    with pytest.raises(UserError, match="has not a byte for each of the"):
        text(output, **options)
