"""Text as windows of tokens: what they hold."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jshard.data.tokenizers.tokenizer import ByteTokenizer
from texts import epoch, text, tokens_of, window

BYTES = ByteTokenizer()
decode = BYTES.decode

# Windows.


def test_targets_are_inputs_shifted_by_one(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 9)
    whole = file.read_text()
    for split in ("train", "validation"):
        element = window(text(file, split), 1)
        assert {k: (v.dtype, v.shape) for k, v in element.items()} == {
            "inputs": (np.int32, (8,)),
            "targets": (np.int32, (8,)),
            "weights": (np.float32, (8,)),
        }
        inputs, targets = decode(element["inputs"]), decode(element["targets"])
        assert inputs[1:] == targets[:-1]
        assert inputs + targets[-1] in whole
        assert element["weights"].all()


def test_windows_of_validation_cover_it_and_the_last_is_padded(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(1, 101, dtype=np.uint16).tofile(file)
    data = text(file, "validation", validation_fraction=0.3)
    assert len(data) == 4  # 29 targets in windows of 8
    np.testing.assert_array_equal(tokens_of(data), np.arange(71, 101))
    last = list(data)[-1]
    np.testing.assert_array_equal(last["weights"], [1] * 5 + [0] * 3)
    np.testing.assert_array_equal(last["targets"], [96, 97, 98, 99, 100, 0, 0, 0])


def test_windows_of_training_drop_what_is_left(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(20, dtype=np.uint16).tofile(file)
    data = text(file, validation_fraction=0)
    assert sorted(epoch(data, 0, 2)[:, 0]) == [0, 8]
    assert sorted(epoch(data, 1, 2)[:, 0]) == [0, 8]
    assert all(window(data, i)["weights"].all() for i in range(4))


@pytest.mark.parametrize("num_files", [1, 3])
def test_training_and_validation_share_no_token(tmp_path, num_files):
    for i, part in enumerate(
        np.array_split(np.arange(500, dtype=np.uint16), num_files)
    ):
        part.tofile(tmp_path / f"{i}.bin")
    held_out = tokens_of(text(tmp_path, "validation", validation_fraction=0.5))
    train = text(tmp_path, validation_fraction=0.5)
    trained_on = {
        *(token for i in range(31) for token in window(train, i)["inputs"]),
        *(token for i in range(31) for token in window(train, i)["targets"]),
    }
    assert trained_on == set(range(249))  # 31 windows of 8, and the last target
    assert set(held_out) == set(range(250, 500))


def test_one_file_holds_out_its_end(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a" * 300 + "b" * 100)
    train = text(file, validation_fraction=0.25)
    assert set(epoch(train, 0, 37).flat) == {ord("a")}
    held_out = tokens_of(text(file, "validation", validation_fraction=0.25))
    assert decode(held_out) == "b" * 100


# Bytes.


@given(st.text())
def test_text_survives_encoding(string):
    tokens = BYTES.encode(string)
    assert tokens.dtype == np.int32
    assert decode(tokens) == string


def test_bytes_that_are_not_text_decode_to_replacement_characters():
    assert decode(np.array([104, 105, 255])) == "hi\ufffd"
