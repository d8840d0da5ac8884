"""Chats as training data: their text, their tokens, and those of answers."""

import datetime
import gc
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jshard.data.tokenizers.chat_template
from jshard.data.text.streamed_text import _Encoder
from jshard.data.text.token_writer import write_token_files
from jshard.data.tokenizers.chat import _load_chat, load_chat
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.errors import UserError
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
        return load_chat(load_tokenizer(folder), "here")

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
        chat = load_chat(load_tokenizer(folder), "here")
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


LONG = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


@pytest.mark.quick(
    *("{% for", "{{ 7", "{{ '%", "{% macro", "template9", "{{ ''.__class__"),
)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LONG, "jinja refuses it: it takes more than 0.3 s"),
        ("{{ 7 ** (10 ** 9) }}", "takes more than 0.3 s"),  # in C, which holds the GIL
        ("{{ '%99999999999d' % 1 }}", "jinja refuses it: "),
        ("{{ 'a' * 99999999999 }}", "jinja refuses it: MemoryError"),
        (
            "{{ messages[0].role[0] * 99999999 }}",
            "it: a text of 99,999,999 charac",
        ),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
        ("{{ " + "(" * 9999, "jinja: not a Jinja template: "),
        ("{% if 1 %}" * 999, "jinja: not a Jinja template: "),
        ("{{ 1 " + "+ 1" * 99999 + "}}", "jinja: not a Jinja template: "),
        (
            MARKED.replace("{{ eos", "{% generation %}{% endgeneration %}{{ eos"),
            "marks an answer within another",
        ),
        ("{{ ''.__class__.__mro__ }}", "refuses it: .*unsafe"),
    ],
)
def test_a_hostile_template_is_one_line_in_time(chat, template, message, monkeypatch):
    monkeypatch.setattr(jshard.data.tokenizers.chat_template, "_SECONDS", 0.3)
    with pytest.raises(UserError, match=message) as refused:
        chat(template).encode(CAPITALS, "here")
    assert len(str(refused.value)) < 600


def test_a_template_goes_on_after_one_text_that_took_too_long(chat, monkeypatch):
    monkeypatch.setattr(jshard.data.tokenizers.chat_template, "_SECONDS", 0.3)
    slow = chat("{% if messages | length > 2 %}" + LONG + "{% endif %}hello")
    with pytest.raises(UserError, match="takes more than"):
        slow.render([{}] * 3)
    assert slow.render([{}]) == "hello"


def test_the_process_of_a_template_ends_with_it(chat):
    one = chat("hello")
    process = one._template._process
    assert process.poll() is None
    _load_chat.cache_clear()
    del one
    gc.collect()
    assert process.poll() is not None


def test_values_that_json_lacks_are_written_as_text(chat):
    day = datetime.date(2026, 1, 2)
    message = {"role": "user", "content": day, "n": np.arange(2), "x": float("nan")}
    record = types.MappingProxyType(message)
    found = chat(
        "{% for m in messages %}{{ m.content }} {{ m.n }} {{ m.x }}{% endfor %}"
    )
    assert found.render([record]) == "2026-01-02 [0, 1] nan"


def a_pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.mkdir(), "chat_template.jinja: cannot be read: .*directory"),
        (a_pipe, "chat_template.jinja: cannot be read: .*not a regular file"),
        (lambda file: file.write_bytes(b"\xff"), "cannot be read: .*utf-8"),
        (lambda file: file.symlink_to("/dev/zero"), "not a regular file"),
    ],
)
def test_what_is_no_template_s_file_is_one_line(make, message, tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    make(folder / "chat_template.jinja")
    with pytest.raises(UserError, match=message):
        load_chat(load_tokenizer(folder), "here")


@pytest.mark.parametrize(
    "template", [3, {}, [3], [[]], [{}], [{"name": []}], [{"name": "default"}]]
)
def test_a_template_of_another_kind_is_one_line(template, tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer", chat_template=template)
    with pytest.raises(UserError, match="has no chat template"):
        load_chat(load_tokenizer(folder), "here")


def test_a_missing_template_is_one_line(tmp_path, monkeypatch):
    folder = make_tokenizer(tmp_path / "bare")
    with pytest.raises(UserError, match="bare: has no chat template, neither"):
        load_chat(load_tokenizer(folder), "here")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(UserError, match=r"need jinja2: pip install 'jshard\[text\]'"):
        load_chat(load_tokenizer(folder), "here")


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
    options: Any = {"tokenizer": folder, "pack": True, "validation_fraction": 0}
    data = text(file, sequence_length=100, **options)
    row = window(data, 0)
    tokenizer = load_tokenizer(folder)
    trained_on = tokenizer.decode(row["targets"][row["weights"] > 0])
    assert trained_on.startswith("Answer ")
    assert trained_on.count("Answer") == row["segment_ids"].max() >= 2
    assert "Question" not in trained_on
    assert row["targets"][row["weights"] > 0][-1] == 3  # the end of an answer
    whole = window(text(file, sequence_length=100, all_tokens=True, **options), 0)
    np.testing.assert_array_equal(whole["weights"], whole["segment_ids"] > 0)
    assert "Question" in tokenizer.decode(whole["targets"][whole["weights"] > 0])
    for all_tokens in (False, True):  # of a stream
        (document,) = _Encoder(tokenizer, "text", True, all_tokens)(records[0])
        assert (document.trained is None) == all_tokens


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
    _load_chat.cache_clear()
    with pytest.raises(UserError, match="made with another chat_template"):
        write_token_files([corpus], Path(folder), output, part_bytes=2000)
    next(output.glob("*.trained")).write_bytes(b"1")
    with pytest.raises(UserError, match="does not have a byte for each of the"):
        text(output, **options)
