"""Records in the forms of TRL, ShareGPT and Alpaca: recognised, said, or refused."""

import json

import numpy as np
import pytest

from jshard.data.files.conversations import (
    ALPACA,
    MESSAGES,
    PAIR,
    SHAREGPT,
    as_chat,
    form_of_record,
)
from jshard.data.files.noting import noted
from jshard.data.text.text_data import text_data
from jshard.data.text.token_writer import write_token_files
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import CHATML, make_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TALK = [
    {"role": "user", "content": "The capital of France?"},
    {"role": "assistant", "content": "Paris."},
]
RECORDS = {
    "messages": {"messages": TALK},
    "turns": {
        "conversations": [
            {"from": "human", "value": "The capital of France?"},
            {"from": "gpt", "value": "Paris."},
        ]
    },
    "turns that are messages": {"conversations": TALK},
    "instruction": {"instruction": "The capital of France?", "output": "Paris."},
    "empty input": {
        **{"instruction": "The capital of France?", "input": "", "output": "Paris."},
        **{"history": [], "system": ""},
    },
    "prompt of messages": {"prompt": TALK[:1], "completion": TALK[1:]},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = make_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), eos_token="<|im_end|>"
    )
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def row_of(folder, tokenizer, record, **options):
    """The first packed row of a file with one record, and what is said of the file."""
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    with noted() as said:
        data = text_data(
            str(folder / "data.jsonl"),
            "train",
            **{"sequence_length": 64, "seed": 0, "pack": True} | options,
            tokenizer=str(tokenizer),
            validation_fraction=0,
        )
    return data[0], said


@pytest.mark.parametrize("name", RECORDS)
def test_a_conversation_is_the_same_in_every_form(name, tokenizer, tmp_path):
    row, said = row_of(tmp_path, tokenizer, RECORDS[name])
    expected, _ = row_of(tmp_path, tokenizer, RECORDS["messages"])
    for key, x in expected.items():
        np.testing.assert_array_equal(row[key], x)
    trained = row["targets"][row["weights"] > 0]
    assert load_tokenizer(tokenizer).decode(trained, special=True) == "Paris.<|im_end|>"
    first = next(iter(RECORDS[name]))
    assert len(said) == 1
    assert f"'{first}'" in said[0]


def test_an_input_history_and_system_are_earlier_messages():
    record = {
        **{
            "instruction": "Add.",
            "input": "1 + 1",
            "output": "2",
            "system": "Be brief.",
        },
        "history": [["Hi", "Hello"]],
    }
    chat, given = as_chat(record, ALPACA, "here")
    said = [(x["role"], x["content"]) for x in chat["messages"]]
    assert (said, given) == (
        [
            *[("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")],
            *[("user", "Add.\n1 + 1"), ("assistant", "2")],
        ],
        0,
    )


def test_answers_in_a_prompt_are_no_targets(tokenizer, tmp_path):
    more = [{"role": "user", "content": "And of Italy?"}]
    record = {
        "prompt": [*TALK, *more],
        "completion": [{"role": "assistant", "content": "Rome."}],
    }
    row, _ = row_of(tmp_path, tokenizer, record)
    trained = row["targets"][row["weights"] > 0]
    assert load_tokenizer(tokenizer).decode(trained, special=True) == "Rome.<|im_end|>"


def test_a_pair_of_texts_has_no_template_and_trains_on_its_completion(
    tokenizer, tmp_path
):
    record = {"prompt": "The capital of France is", "completion": " Paris."}
    row, said = row_of(tmp_path, tokenizer, record)
    loaded = load_tokenizer(tokenizer)
    # TRL: the tokens of both together and the end; the completion's are targets.
    whole = [*loaded.encode("The capital of France is Paris."), loaded.eos_id]
    prompt = loaded.encode("The capital of France is")
    count = len(whole) - 1
    np.testing.assert_array_equal(row["targets"][:count], whole[1:])
    np.testing.assert_array_equal(
        row["weights"][:count], np.arange(1, len(whole)) >= len(prompt)
    )
    assert "'prompt' and 'completion'" in said[0]


def test_a_named_text_goes_before_every_form(tokenizer, tmp_path):
    record = {"prompt": "The capital of France is", "completion": " Paris."}
    row, said = row_of(tmp_path, tokenizer, record, text_key="completion")
    loaded = load_tokenizer(tokenizer)
    (expected,) = loaded.encode_documents([" Paris."])
    np.testing.assert_array_equal(row["inputs"][: len(expected) - 1], expected[:-1])
    assert not said
    assert form_of_record({"text": "", "instruction": "", "output": ""}, "text") == ""


def test_token_files_hold_conversations_and_pairs(tokenizer, tmp_path, capsys):
    for number, name in enumerate(("turns", "instruction")):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(RECORDS[name]) + "\n")
    pair = {"prompt": "The capital of France is", "completion": " Paris."}
    (tmp_path / "2.jsonl").write_text(json.dumps(pair) + "\n")
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    write_token_files(files, tokenizer, tmp_path / "out")
    said = capsys.readouterr().out
    for words in ("ShareGPT", "Alpaca", "'prompt' and 'completion'", "data.pack=True"):
        assert words in said
    (tokens,) = (tmp_path / "out").glob("*.bin")
    trained = np.fromfile(tokens.with_suffix(".trained"), bool)
    kept = np.memmap(tokens, "<u2", offset=1024)[trained]
    end, text = "<|im_end|>", load_tokenizer(tokenizer).decode(kept, special=True)
    assert text == f"Paris.{end}Paris.{end} Paris.{end}"


@pytest.mark.parametrize(
    ("record", "form", "said"),
    [
        ({"messages": TALK}, SHAREGPT, "has no 'conversations', as the first record"),
        ({"conversations": []}, SHAREGPT, "'conversations' is empty"),
        ({"conversations": "Hi"}, SHAREGPT, "is a str, not a list of messages"),
        ({"conversations": ["Hi"]}, SHAREGPT, "a turn is a str, not an object"),
        ({"conversations": [{"from": "cat", "value": "x"}]}, SHAREGPT, "from 'cat'"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, SHAREGPT, "'value' of a"),
        ({"instruction": "x", "output": None}, ALPACA, "'output' is a NoneType"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, ALPACA, "'history'"),
        ({"prompt": TALK, "completion": "y"}, PAIR, "'completion' is a str"),
        ({"text": "x"}, MESSAGES, "has no 'messages', as the first record"),
    ],
)
def test_what_is_not_of_the_form_is_named(record, form, said):
    with pytest.raises(UserError, match=said):
        as_chat(record, form, "line 3")


def test_a_record_of_no_form_is_told_all_forms(tokenizer, tmp_path):
    record = {"question": "x", "answers": ["y"]}
    said = r"'text' is not there.* one of question, or give records the keys of 'mess"
    with pytest.raises(UserError, match=said):
        row_of(tmp_path, tokenizer, record)
