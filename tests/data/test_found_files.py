"""Folders and files as people have them: what is read, as what, and what is said."""

import csv
import gzip
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jshard.data.files.noting import noted
from jshard.data.files.split_names import named_splits
from jshard.data.text.corpus import corpus_files, split_corpus
from jshard.data.tokenizers.tokenizer import ByteTokenizer
from jshard.system.errors import UserError
from texts import text, tokens_of

decode = ByteTokenizer().decode


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": x}) + "\n" for x in texts)


def put(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return folder


def splits(folder: Path, **options: Any) -> dict[str, list[str]]:
    given = {"validation_fraction": 0.05, "token_dtype": "uint16", **options}
    found = split_corpus(str(folder), **given)
    return {split: sorted({x.name for x in found[split]}) for split in found}


# Splits.


@pytest.mark.parametrize("word", ["test", "dev", "eval", "heldout", "Validation"])
@pytest.mark.parametrize("form", ["{}-00000-of-00001.jsonl", "data/{}/0.jsonl"])
def test_no_file_named_for_another_split_is_trained_on(tmp_path, word, form):
    put(tmp_path, {form.format(x): lines(x * 40) for x in ("train", word)})
    found = splits(tmp_path)
    assert found["train"] == [form.format("train")]
    of_validation = word in ("dev", "heldout", "Validation")
    other = form.format(word if of_validation else "train")
    assert found["validation"] in ([other], [])
    trained_on = decode(tokens_of(text(tmp_path, "train", validation_fraction=0)[:9]))
    assert set(trained_on) <= {*"train\0"}


def test_names_are_those_that_datasets_takes_for_splits():
    named = {
        "train": ["train.txt", "my-train-file.txt", "training_0.txt", "train/val.txt"],
        "validation": ["x/valid/0.txt", "dev2.txt", "fine_val_000.bin"],
        "named as test data": ["testing.txt", "a/evaluation/train.txt", "dev-test.txt"],
        "whose names say no split": ["trainval.txt", "latest.txt", "evaluate.txt"],
    }
    found = named_splits([name for names in named.values() for name in names])
    assert {
        "train": found.train, "validation": found.validation, **found.left_out,
    } == named  # fmt: skip
    assert named_splits(["a.txt", "val.txt"])[:2] == (["a.txt"], ["val.txt"])
    with pytest.raises(UserError, match=r"train_eval\.txt: is named for both train"):
        named_splits(["train_eval.txt"])
    with pytest.raises(UserError, match=r"test\.txt: this and all other files in"):
        named_splits(["test.txt"])


def test_two_shards_lose_records_to_validation_and_no_whole_file(tmp_path):
    texts = [f"{i:02}" * 10 for i in range(80)]
    put(tmp_path, {"0.jsonl": lines(*texts[:40]), "1.jsonl": lines(*texts[40:])})
    held_out = tokens_of(text(tmp_path, "validation", validation_fraction=0.1))
    assert decode(held_out) == "\0".join([*texts[72:], ""])
    assert splits(tmp_path)["train"] == ["0.jsonl", "1.jsonl"]


def test_links_to_folders_are_followed_once_and_hidden_folders_are_not(tmp_path):
    put(tmp_path / "far", {"a.txt": "a" * 50, "deep/b.txt": "b" * 50})
    put(tmp_path / "here", {"c.txt": "c" * 50, "own/d.txt": "d" * 50})
    put(tmp_path / "here", {".ipynb_checkpoints/c.txt": "x", "__MACOSX/c.txt": "x"})
    os.symlink(tmp_path / "far", tmp_path / "here" / "shards")
    os.symlink(tmp_path / "here", tmp_path / "far" / "deep" / "back")
    os.symlink(tmp_path / "here" / "own", tmp_path / "here" / "again")
    names = [name for _, name in corpus_files(tmp_path / "here")]
    assert names == ["c.txt", "own/d.txt", "shards/a.txt", "shards/deep/b.txt"]


# Forms of records.


def table(delimiter: str) -> str:
    file = io.StringIO()
    rows = [["id", "text"], *([i, f'{x}, "{x}"\n'] for i, x in enumerate("ab"))]
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue()


ARRAY = json.dumps([{"text": "first"}, {"text": "second"}], indent=1)
TWO = lines("first", "second")


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.json", ARRAY, ["first", "second"]),
        ("a.json", "\ufeff" + ARRAY, ["first", "second"]),
        ("a.json", TWO, ["first", "second"]),
        ("a.JSONL", TWO, ["first", "second"]),
        ("a.ndjson", TWO, ["first", "second"]),
        ("c4.json.gz", gzip.compress(TWO.encode(), mtime=0), ["first", "second"]),
        ("a.csv", table(","), ['a, "a"\n', 'b, "b"\n']),
        ("a.TSV", table("\t"), ['a, "a"\n', 'b, "b"\n']),
        ("long.csv", "text\n" + "x" * 200_000, ["x" * 200_000]),
    ],
)  # fmt: skip
def test_records_are_read_from_every_form_and_never_as_prose(
    tmp_path, name, content, want
):
    put(tmp_path, {name: content})
    for path in (tmp_path, tmp_path / name):
        found = split_corpus(str(path), validation_fraction=0, token_dtype="uint16")
        (piece,) = found["train"]
        assert decode(piece.load()) == "".join(f"{x}\0" for x in want)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            '{\n "name": "a package"\n}',
            r"is not JSON: .*an array of objects",
        ),
        ("a.json", "[1]", r"a\.json: object 0 is a int, not a JSON object"),
        ("a.csv", "text,b\nx\n", r"a\.csv: row 1 has not as many fields"),
        ("a.csv", 'text\n"x', r"a\.csv: cannot be read as csv: unexpected end"),
        ("a.csv", "a,b\n1,2\n", r"a\.csv: row 1: 'text' is not there, not a text; set"),
    ],
)
def test_other_json_and_tables_are_refused_in_one_line(
    tmp_path, name, content, message
):
    with pytest.raises(UserError, match=message) as error:
        splits(put(tmp_path, {name: content}) / name)
    assert "\n" not in str(error.value)


# Forms of tokens.


def megatron(lengths: list[int], code: int, bounds: list[int], size: int) -> bytes:
    places = np.cumsum([0, *lengths[:-1]]) * size
    return b"".join(
        [
            b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds)),
            np.array(lengths, "<i4").tobytes(),
            places.astype("<i8").tobytes(),
            np.array(bounds, "<i8").tobytes(),
        ]
    )


TOKENS = np.random.default_rng(0).integers(0, 50_257, 40)


def numpy_file(tokens: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


@pytest.mark.parametrize(
    ("files", "options", "ends"),
    [
        ({"a.bin": TOKENS.astype("<i4").tobytes()}, {"token_dtype": "int32"}, None),
        ({"a.bin": TOKENS.astype("<i8").tobytes()}, {"token_dtype": "int64"}, None),
        ({"a.npy": numpy_file(TOKENS)}, {}, None),
        ({"a.bin": numpy_file(TOKENS.astype(">u4"))}, {}, None),
        (
            {
                "a.bin": TOKENS.astype("<i4").tobytes(),
                "a.idx": megatron([10, 20, 10], 4, [0, 2, 3], 4),
            },
            {},
            [30, 40],
        ),
    ],
    ids=["int32", "int64", "npy", "big-endian", "megatron"],
)
def test_tokens_are_read_as_their_header_or_the_key_says(
    tmp_path, files, options, ends
):
    given = {"validation_fraction": 0, "token_dtype": "uint16", **options}
    (piece,) = split_corpus(str(put(tmp_path, files)), **given)["train"]
    np.testing.assert_array_equal(piece.load(), TOKENS)
    assert (piece.ends and piece.ends().tolist()) == ends


LITDATA = np.array([3, 20, 24, 28, 32], "<u4").tobytes() + bytes(12)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.bin": TOKENS.astype("<i4").tobytes()}, "every second token is 0 or 1 as"),
        (
            {"a.bin": TOKENS.astype("<i8").tobytes()},
            "to one of uint16, uint32, int32",
        ),
        ({"a.bin": (TOKENS * 2).astype("<u4").tobytes()}, "file of wider integers: se"),
        ({"pytorch_model.bin": b"PK\3\4" + bytes(60)}, "holds no tokens but a ZIP arc"),
        ({"chunk-0-0.bin": LITDATA}, "holds no tokens but a chunk of LitData; move"),
        (
            {"a.bin": b"version https://git-lfs.github.com/spec/v1\n"},
            "run git lfs pull",
        ),
        (
            {"a.bin": bytes(80), "a.idx": megatron([10, 20], 4, [0, 2], 4)},
            "index of Megatron-LM that does not fit the 80 bytes of a.bin",
        ),
        (
            {"a.bin": bytes(80), "a.idx": megatron([10], 7, [0, 1], 8)},
            "tokens of code 7; integers of version 1 are read",
        ),
    ],
    ids=["int32", "int64", "uint32", "torch", "litdata", "lfs", "megatron", "floats"],
)
def test_files_of_other_integers_and_of_no_tokens_are_refused(tmp_path, files, message):
    with pytest.raises(UserError, match=message) as error:
        splits(put(tmp_path, files))
    assert "\n" not in str(error.value)


def test_small_vocabularies_are_no_wider_integers(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2, 4000)
    assert splits(put(tmp_path, {"a.bin": tokens.astype("<u2").tobytes()}))["train"]


def test_negative_tokens_are_named(tmp_path):
    tokens = TOKENS.copy()
    tokens[5] = -100
    put(tmp_path, {"a.bin": tokens.astype("<i4").tobytes()})
    with pytest.raises(UserError, match=r"a\.bin: token -100 at position 5 is neg"):
        text(tmp_path, token_dtype="int32")


# What is said.


def test_the_note_says_what_a_folder_of_mixed_files_was_taken_for(tmp_path):
    files = {
        "README.md": "# About", "package.json": '{\n "name": "x"\n}',
        "train-0.jsonl": lines("a" * 40), "train-1.json": ARRAY, "extra.jsonl": TWO,
        "dev.jsonl": lines("b" * 40), "test.jsonl": lines("c" * 40),
    }  # fmt: skip
    put(tmp_path, files)
    with noted() as said:
        text(tmp_path)
        text(tmp_path, "validation")
    assert said == [
        f"{tmp_path}: 5 files of records, and 2 that are not read (README.md, "
        "package.json); train on 2 files (train-0.jsonl, train-1.json); validate with "
        "1 file (dev.jsonl); leave out 1 file (extra.jsonl), whose names say no split; "
        "leave out 1 file (test.jsonl), named as test data"
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin", "a.parquet", "a.npy"])
def test_a_pointer_of_git_lfs_is_not_read_for_the_file(name, tmp_path):
    """Of a text or of tokens it would be trained on."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(UserError, match=rf"{name}: a pointer of Git LFS.*git lfs pull"):
        split_corpus(str(tmp_path), validation_fraction=0.1, token_dtype="uint16")
