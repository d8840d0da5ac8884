"""Which of a tokenizer's templates writes a chat, and what it gets of the messages."""

import json

import pytest

from jshard.data.tokenizers.chat import _load_chat, load_chat
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import CHATML, make_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"default": CHATML, "tool_use": "tools {{ tools[0].function.name }}"}


@pytest.fixture
def folder(tmp_path):
    load_tokenizer.__globals__["_load"].cache_clear()
    _load_chat.cache_clear()
    return make_tokenizer(tmp_path / "tokenizer")


def chat_of(folder, template=None, **files):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    places = {"tool_use": "additional_chat_templates/tool_use.jinja"}
    for name, content in files.items():
        (folder / places.get(name, "chat_template.jinja")).write_text(content)
    return load_chat(load_tokenizer(folder), "here")


@pytest.mark.parametrize(
    ("template", "files"),
    [
        ([{"name": k, "template": v} for k, v in NAMED.items()], {}),
        (NAMED, {}),
        ("not this", NAMED),
    ],
)
def test_a_chat_with_tools_has_its_own_template(folder, template, files):
    chat = chat_of(folder, template, **files)
    assert chat.render(TURNS, tools=TOOLS) == "tools f"
    assert chat.render(TURNS).startswith("<|im_start|>user\na<|im_end|>")
    for tools in (TOOLS, json.dumps(TOOLS)):
        tokens, trained = chat.encode({"messages": TURNS, "tools": tools}, "here")
        assert tokens.tolist() == load_tokenizer(folder).encode("tools f").tolist()
        assert not trained.any()  # it writes no messages
    with pytest.raises(UserError, match="here: 'tools' is not JSON"):
        chat.encode({"messages": TURNS, "tools": "f"}, "here")


def test_templates_without_a_default_write_chats_with_tools_alone(folder):
    chat = chat_of(folder, {"tool_use": NAMED["tool_use"]})
    assert chat.render(TURNS, tools=TOOLS) == "tools f"
    with pytest.raises(UserError, match="are tool_use, none of them default"):
        chat.render(TURNS)


def test_keys_of_messages_that_are_null_are_missing_as_in_transformers(folder):
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c }}{% endfor %}"
        "{% endif %}{{ m.content | default('') }};{% endfor %}"
    )
    calls = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    turns = [{**TURNS[0], "tool_calls": None, "name": None}, calls]
    chat = chat_of(folder, chat_template=template)
    assert chat.render(turns) == "user:a;assistant:f;"
    assert "content" in calls


def test_thoughts_that_a_template_does_not_read_are_told_once(folder, capsys):
    answer = {**TURNS[1], "reasoning_content": "c", "thinking": "d", "reasoning": None}
    reading = CHATML.replace("message['content']", "message.thinking | default('u')")
    chat = chat_of(folder, chat_template=reading)
    for _ in range(2):
        chat.encode({"messages": [TURNS[0], answer]}, "here")
    told = capsys.readouterr().err
    assert told.count("does not read 'reasoning_content' of messages") == 1
    assert "'thinking'" not in told
    assert "'reasoning' " not in told
