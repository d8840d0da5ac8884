"""Preferences as TRL's users have them, and what is wrong with some."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.data.preferences.preference_data import (
    named_preference_data,
    preference_data,
)
from jshard.data.stream_reader import StreamReader
from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import CHATML, make_tokenizer

T = 48
EQUAL = {"prompt": "a ", "chosen": "b", "rejected": "b"}
GOOD = {"prompt": "a ", "chosen": "b", "rejected": "cd"}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION, RIGHT, WRONG = "The capital of France?", "Paris.", "It is 1234."
ASKED = [said("user", QUESTION)]
GOOD_CHAT = {
    "prompt": ASKED,
    "chosen": [said("assistant", RIGHT)],
    "rejected": [said("assistant", WRONG)],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    pytest.importorskip("tokenizers")
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), begins=True)
    (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


def write(folder: Path, *records: Any, name: str = "pairs.jsonl") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"{json.dumps(x)}\n" for x in records))
    return str(folder)


def read(path: str, split: str = "train", tokenizer: str = "", **options: Any) -> Any:
    given = {"sequence_length": T, "seed": 0, "validation_fraction": 0.0} | options
    return preference_data(path, split, tokenizer=tokenizer, **given)


def texts(example: Any, tokenizer: str = "") -> list[tuple[str, str]]:
    """What each row shows and what it asks for: prompt and answer."""
    found, decode = [], load_tokenizer(tokenizer)
    for i in range(2):
        inputs, targets, real, answers = (
            example[name][i::2] for name in ("inputs", "targets", "texts", "answers")
        )
        np.testing.assert_array_equal(inputs[1:][real[1:]], targets[:-1][real[1:]])
        assert not answers[~real].any()
        first = int(np.argmax(answers))
        assert answers[first : int(real.sum())].all()
        found.append(
            (decode.decode(inputs[: first + 1]), decode.decode(targets[answers]))
        )
    return found


def test_texts_are_prompts_and_answers_with_an_end(tmp_path):
    example = read(
        write(tmp_path, {"prompt": "one ", "chosen": "two", "rejected": "5"})
    )[0]
    assert {name: (x.dtype.name, x.shape) for name, x in example.items()} == {
        "inputs": ("int32", (2 * T,)),
        "targets": ("int32", (2 * T,)),
        "texts": ("bool", (2 * T,)),
        "answers": ("bool", (2 * T,)),
    }
    assert texts(example) == [("one ", "two\0"), ("one ", "5\0")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("sky: blue", "sky: green", "sky:"),  # the space belongs to the answers
        ("sky=blue", "sky=green", "sky="),
        ("ab", "abc", "a"),  # no answer is empty
    ],
)
def test_the_prompt_of_texts_is_what_both_begin_with(
    tmp_path, chosen, rejected, prompt
):
    example = read(write(tmp_path, {"chosen": chosen, "rejected": rejected}))[0]
    want = [(prompt, f"{x.removeprefix(prompt)}\0") for x in (chosen, rejected)]
    assert texts(example) == want


@pytest.mark.parametrize(
    "record",
    [
        GOOD_CHAT,
        {name: ASKED + GOOD_CHAT[name] for name in ("chosen", "rejected")},
        {name: ASKED + GOOD_CHAT[name] for name in ("chosen", "rejected")}
        | {"prompt": QUESTION},
    ],
    ids=["explicit", "implicit", "beside"],
)
def test_chats_are_written_by_the_template(tmp_path, tokenizer, record):
    example = read(write(tmp_path, record), tokenizer=tokenizer)[0]
    prompt = f"user\n{QUESTION}\nassistant\n"
    assert texts(example, tokenizer) == [(prompt, f"{x}\n") for x in (RIGHT, WRONG)]
    (end,) = load_tokenizer(tokenizer).encode("<|im_end|>")[1:]  # after <s>
    assert end in example["targets"][example["answers"]]


def test_texts_begin_and_end_as_the_tokenizer_says(tmp_path, tokenizer):
    record = {"prompt": "The ", "chosen": "dog", "rejected": "fox<|endoftext|>"}
    example = read(write(tmp_path, record), tokenizer=tokenizer)[0]
    ids = load_tokenizer(tokenizer)
    assert ids.bos_id is None  # it is the template of texts that adds it
    begin = ids.encode("The dog")
    for i in range(2):
        assert example["inputs"][i] == begin[0]
        targets = example["targets"][i::2][example["answers"][i::2]]
        assert list(targets).count(ids.eos_id) == 1
        assert targets[-1] == ids.eos_id


def test_long_answers_are_cut_and_pairs_come_in_another_order_each_epoch(tmp_path):
    records = [
        {"prompt": "p", "chosen": f"{i}" * 60, "rejected": "r"} for i in range(8)
    ]
    data = read(write(tmp_path, *records))
    assert data[0]["texts"][0::2].sum() == T
    epochs = [[data[8 * e + i]["targets"][0] for i in range(8)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_validation_is_a_named_file_or_the_last_pairs(tmp_path):
    records = [GOOD | {"chosen": f"{i}"} for i in range(10)]
    path = write(tmp_path / "one", *records)
    split = lambda path, name, **kw: read(path, name, **kw)
    assert len(split(path, "validation", validation_fraction=0.2)) == 2
    last = split(path, "validation", validation_fraction=0.2)[1]
    assert texts(last)[0] == ("a ", "9\0")
    write(tmp_path / "one", *records[:3], name="val.jsonl")
    assert len(split(path, "validation", validation_fraction=0.2)) == 3
    with pytest.raises(UserError, match=r"no pairs for validation; change data\.val"):
        split(write(tmp_path / "two", *records), "validation")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([EQUAL], "'chosen' and 'rejected' are the same; remove the record"),
        ([EQUAL, GOOD, EQUAL], r"are the same.*\(1 more records cannot be used"),
        ([GOOD | {"chosen": " "}], "an answer is empty"),
        ([GOOD | {"prompt": "x" * 49}], "has 49 tokens, which leaves no room .*h=48"),
        ([{"prompt": "x" * 40} | {"chosen": "y" * 9, "rejected": "y" * 10}], "cut"),
        ([{"prompt": "a", "chosen": "b"}], "has no 'rejected', but chosen, prompt; a"),
        ([GOOD | {"chosen": 5}], "'chosen' is neither a text nor a list of .* a int"),
        ([GOOD | {"chosen": ["a"]}], "'chosen' is neither a text nor a list of mess"),
        ([GOOD | {"chosen": ASKED}], "'chosen' is a chat, and 'rejected' is a text"),
        ([GOOD | {"prompt": ASKED}], "'prompt' is a chat, and 'chosen' is a text"),
        ([GOOD_CHAT], "chats need the template of a tokenizer: set data.tokenizer"),
        ([GOOD | {"chosen": "\ud800"}], "not valid Unicode"),
        ([], "has no pairs for train"),
    ],
)
def test_what_is_no_pair_is_an_error_of_one_line(tmp_path, records, message):
    with pytest.raises(UserError, match=message) as error:
        read(write(tmp_path, *records))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_other_bad_input_is_an_error_of_one_line(tmp_path, tokenizer):
    empty = GOOD_CHAT | {"rejected": [said("assistant", "")]}
    with pytest.raises(UserError, match="an answer is empty"):
        read(write(tmp_path / "chat", empty), tokenizer=tokenizer)
    path = write(tmp_path / "tools", GOOD_CHAT | {"tools": "{"})
    with pytest.raises(UserError, match="'tools' is not JSON"):
        read(path, tokenizer=tokenizer)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError, match=r"text\.txt: preferences are records of JSONL"):
        read(str(tmp_path / "text.txt"))
    with pytest.raises(UserError, match="no such file or folder"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(
        UserError, match=r"a token of 98 or more; raise model\.vocab_size"
    ):
        read(write(tmp_path / "few", GOOD), vocab_size=98)


def named(folder: str, split: str = "train", **options: Any) -> Any:
    given = {"sequence_length": T, "seed": 0, "tokenizer": "", "shuffle_rows": 0}
    return named_preference_data(folder, split, **given | options)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs jshard[datasets]")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_a_dataset_of_hugging_face_has_its_own_splits(tmp_path):
    folder = write(tmp_path / "named", GOOD, name="train.jsonl")
    write(tmp_path / "named", GOOD | {"chosen": "e"}, EQUAL, name="test.jsonl")
    write(tmp_path / "named", GOOD | {"chosen": "f"}, name="validation.jsonl")
    want = [("a ", "b\0"), ("a ", "cd\0")]
    assert texts(named(folder, kept=True)[0]) == want
    (streamed,) = StreamReader(named(folder), batch_size=1, start_step=0, num_steps=1)
    assert texts({name: x[0] for name, x in streamed.items()}) == want
    held_out = named(folder, "validation")
    assert len(held_out) == 1
    assert texts(held_out[0])[0] == ("a ", "f\0")
    assert named(folder, "validation", validation_rows=0) is None
    with pytest.raises(UserError, match=r"row 1: 'chosen' and 'rejected' are the same"):
        named(folder, train_split="test", kept=True)
    with pytest.raises(
        UserError, match=r"the row .*'chosen' and 'rejected' are the sa"
    ):
        next(
            StreamReader(
                named(folder, train_split="test"),
                batch_size=2,
                start_step=0,
                num_steps=1,
            )
        )
    with pytest.raises(
        UserError, match=r"has no split .none.; set data\.split to one of"
    ):
        named(folder, train_split="none")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_of_pairs_holds_out_the_first_and_resumes(tmp_path, processes):
    for name in "ab":  # two files
        rows = [GOOD | {"chosen": f"{name}{i}"} for i in range(6)]
        write(tmp_path / "rows", *rows, name=f"train-{name}.jsonl")
    pairs = named(
        str(tmp_path / "rows"), validation_rows=2, shuffle_rows=4, train_split="train"
    )
    held_out = named(str(tmp_path / "rows"), "validation", validation_rows=2)
    assert [texts(held_out[i])[0][1] for i in range(2)] == ["a0\0", "a1\0"]

    def chosen(start: int, states: Any) -> tuple[list[Any], Any]:
        """The answers of four steps, and the states after two."""
        found, kept = [], []
        for process in range(processes):
            reader = StreamReader(
                pairs, states and states[process], batch_size=2, start_step=start,
                num_steps=4, process_index=process, process_count=processes,
            )  # fmt: skip
            for step, batch in enumerate(reader, start):
                rows = [
                    {k: x[i] for k, x in batch.items()} for i in range(2 // processes)
                ]
                found += [(step, texts(row)[0][1]) for row in rows]
                if step == 1:
                    kept.append(reader.get_state())
        return sorted(found), kept

    whole, states = chosen(0, None)
    said = [answer for _, answer in whole]
    assert len({*said}) == 8  # each once, none of those that are held out
    assert not {"a0\0", "a1\0"} & {*said}
    assert chosen(2, states)[0] == [x for x in whole if x[0] >= 2]


def test_parquet_is_read_as_jsonl_is(tmp_path, tokenizer):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write(tmp_path / "lines", GOOD_CHAT)
    (tmp_path / "table").mkdir()
    parquet.write_table(
        arrow.Table.from_pylist([GOOD_CHAT]), tmp_path / "table" / "pairs.parquet"
    )
    want = read(path, tokenizer=tokenizer)[0]
    got = read(str(tmp_path / "table"), tokenizer=tokenizer)[0]
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)
