"""Which of a tokenizer's templates writes a chat, and what it gets of the messages."""

import json

import numpy as np
import pytest

from jshard.data.files.conversations import as_chat
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


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_finds_thoughts_under_either_name_as_in_transformers(
    folder, capsys, given, read
):
    written = f"{{{{ messages[-1].{read} | default('none') }}}}"
    template = f"{{% generation %}}{written}{{% endgeneration %}}"
    chat = chat_of(folder, chat_template=template)
    thought = [TURNS[0], {**TURNS[1], given: "c"}]
    assert chat.render(thought) == "c"
    assert chat.render([TURNS[0], {**TURNS[1], given: None}]) == "none"
    chat.encode({"messages": thought}, "here")
    assert not capsys.readouterr().err


def test_thoughts_that_a_template_does_not_read_are_told_once(folder, capsys):
    answer = {**TURNS[1], "reasoning_content": "c", "thinking": "d", "reasoning": None}
    reading = CHATML.replace("message['content']", "message.reasoning | default('u')")
    chat = chat_of(folder, chat_template=reading)
    for _ in range(2):
        chat.encode({"messages": [TURNS[0], answer]}, "here")
    told = capsys.readouterr().err
    assert told.count("does not read 'reasoning_content' of messages") == 1
    assert told.count("does not read 'thinking' of messages") == 1
    assert "'reasoning' " not in told


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_a_record_s_options_reach_the_template_as_with_trl(folder, form):
    template = "{{ '/think' if enable_thinking else '/no' }}" + CHATML
    chat = chat_of(folder, chat_template=template)
    pair = {"messages": TURNS, "prompt": TURNS[:1], "completion": TURNS[1:]}
    for options, said in (({"enable_thinking": True}, "/think"), (None, "/no")):
        record = as_chat(pair | {"chat_template_kwargs": options}, form, "here").chat
        tokens, trained = chat.encode(record, "here")
        text = load_tokenizer(folder).decode(tokens, special=True)
        assert text == said + chat.render(TURNS).removeprefix("/no")
        assert trained.any()


@pytest.mark.parametrize("options", ["on", {"tools": []}])
def test_options_that_are_none_of_a_template_are_one_line(folder, options):
    record = {"messages": TURNS, "chat_template_kwargs": options}
    with pytest.raises(UserError, match=r"here: 'chat_template_kwargs' is .* besides"):
        chat_of(folder, chat_template=CHATML).encode(record, "here")


LONGER = [
    *TURNS,
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def trained_on(folder, template, messages=LONGER):
    """The parts of a chat that are trained on, joined by a bar."""
    tokens, trained = chat_of(folder, chat_template=template).encode(
        {"messages": messages}, "here"
    )
    tokenizer = load_tokenizer(folder)
    parts = np.split(tokens, np.flatnonzero(np.diff(trained)) + 1)
    first = 0 if trained[0] else 1
    return "|".join(tokenizer.decode(x, special=True) for x in parts[first::2])


def test_an_end_of_the_whole_text_is_none_of_earlier_answers(folder):
    template = "{% for m in messages %}{{ m.role }}<|im_end|>{{ m.content }}"
    template += "<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant<|im_end|>{% else %}"
    template += prompt + "{{ eos_token }}{% endif %}"
    ends = "b<|im_end|>|d<|im_end|>\n<|endoftext|>"
    assert trained_on(folder, template) == ends


TURN = "{% for m in messages %}{{ '' if m.role == 'user' else 'A:' }}{{ m.content }}"
PROMPT = "{{ 'A:' if add_generation_prompt }}"
LAST = "loop.last and m.role != 'user'"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            f"{TURN}{{{{ '!' if {LAST} }}}};{{% endfor %}}{PROMPT}",
            "writes messages differently when others follow",
        ),
        (
            f"{TURN}{{{{ '' if {LAST} else ' ' }}}}{{{{ eos_token }}}}{{% endfor %}}"
            + PROMPT,
            "writes the end of an answer differently when others follow",
        ),
        (
            f"{{{{ messages[1].role + '' }}}}{TURN};{{% endfor %}}{PROMPT}",
            "does not write the messages up to it alone",
        ),
        (
            f"{TURN};{{% endfor %}}{PROMPT.replace('A:', 'A:<t>')}",
            "does not begin it with the generation prompt",
        ),
    ],
)
def test_why_the_tokens_of_an_answer_are_not_known_is_said(folder, template, said):
    with pytest.raises(UserError, match=f"answer 2 has is not known, as .* {said}"):
        trained_on(folder, template)
