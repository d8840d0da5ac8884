"""Tokenizers: what they load, and the text they make tokens of."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jshard.data.tokenizers.byte_pieces import PieceTokenizer
from jshard.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from jshard.system.errors import UserError
from small_tokenizer import EOS, TEXT, make_tokenizer
from texts import text, tokens_of, window

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pieces import learn  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_bytes_are_the_default():
    tokenizer = load_tokenizer("")
    assert isinstance(tokenizer, ByteTokenizer)
    assert load_tokenizer("", vocab_size=10) is tokenizer  # tokens may come from .bin
    np.testing.assert_array_equal(tokenizer.encode("hi"), [104, 105])
    assert tokenizer.decode(np.array([104, 105, 255])) == "hi\ufffd"
    assert tokenizer.decode(np.array([104, 500])) == "104 500"
    (document,) = tokenizer.encode_documents(["hi"])
    np.testing.assert_array_equal(document, [104, 105, 0])


def test_a_text_survives_encoding(folder):
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(path)
        tokens = tokenizer.encode(TEXT)
        assert tokens.dtype == np.int32
        assert len(tokens) < len(TEXT) / 2
        assert tokenizer.decode(tokens) == TEXT
        assert (tokenizer.vocab_size, tokenizer.dtype) == (350, np.uint16)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 0)
        (document,) = tokenizer.encode_documents([TEXT])
        np.testing.assert_array_equal(document, [*tokens, 0])


def test_special_tokens_are_named_in_files_beside_it(tmp_path):
    pytest.importorskip("tokenizers")
    named = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    make_tokenizer(tmp_path, begins=True, **named)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 3)
    assert tokenizer.stop_ids == (0, 3)
    assert tokenizer.encode("a")[0] == 1
    (document,) = tokenizer.encode_documents([f"a{EOS}<|im_end|>"])
    assert document.tolist()[-2:] == [0, 3]  # not ended twice
    assert tokenizer.decode(document) == "a"

    other = make_tokenizer(tmp_path / "other", eos_token=None)
    (other / "config.json").write_text('{"eos_token_id": 0, "bos_token_id": 1}')
    tokenizer = load_tokenizer(other)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 0, (0,))


def test_limits_of_a_model_in_the_file_are_left_out(folder, tmp_path):
    contents = json.loads((folder / "tokenizer.json").read_text())
    contents["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    assert len(load_tokenizer(tmp_path).encode(TEXT)) > 50


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "no tokenizer.json here; give a file of Hugging Face's"),
        ("{}", r"tokenizer\.json: not a tokenizer"),
        ("not json", r"tokenizer\.json: not a tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_one_line(tmp_path, contents, message):
    pytest.importorskip("tokenizers")
    if contents is not None:
        (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_tokenizer_larger_than_the_vocabulary_is_one_line(folder):
    assert load_tokenizer(folder, 350)
    message = r"has 350 tokens, more than model\.vocab_size=349; set --config\.model"
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder, 349)


def test_without_the_library_it_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'jshard\[text\]'"):
        load_tokenizer(tmp_path)


# Training text.


def test_windows_of_a_folder_hold_its_files_with_their_ends(folder, tmp_path):
    for name in ("a", "b", "val"):
        (tmp_path / f"{name}.txt").write_text(f"{name} {TEXT}")
    tokenizer = load_tokenizer(folder)
    found = tokens_of(text(tmp_path, "validation", tokenizer=str(folder)))
    np.testing.assert_array_equal(found, [*tokenizer.encode(f"val {TEXT}"), 0])
    data = text(tmp_path, sequence_length=100, tokenizer=str(folder), vocab_size=350)
    whole = [*tokenizer.encode(f"a {TEXT}"), 0, *tokenizer.encode(f"b {TEXT}"), 0]
    seen = {tuple(window(data, i)["inputs"]) for i in range(20)}
    starts = range(0, len(whole) - 100, 100)
    assert seen == {tuple(whole[start : start + 100]) for start in starts}


def test_the_built_in_text_can_be_tokenized(folder, monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text(TEXT * 3)
    (tmp_path / "b.py").write_text(TEXT)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = tokens_of(text("", "validation", tokenizer=str(folder)))
    assert found.max() < 350
    assert load_tokenizer(folder).decode(found) in (TEXT, TEXT * 3)


@given(st.text(max_size=200))
def test_any_text_survives_pieces(text):
    tokenizer = load_tokenizer("python")
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) <= len(text.encode())
    (document,) = tokenizer.encode_documents([text])
    assert document.tolist() == [*tokens, 0]


def test_pieces_are_the_words_of_python_and_their_numbers_stay():
    tokenizer = load_tokenizer("python", 1024)
    assert tokenizer.vocab_size == 1024
    source = "    def __init__(self, value):\n        return self\n"
    tokens = tokenizer.encode(source)
    assert len(tokens) == 14
    words = [tokenizer.decode(token[None]) for token in tokens]
    assert words[:3] == ["    ", "def", " "]
    assert words[-4:] == ["\n        ", "return", " self", "\n"]
    # Checkpoints hold rows of the embedding by these numbers.
    assert tokenizer.digest.startswith("da7b0747")
    assert tokenizer.decode(np.array([1024, 7])) == "1024 7"
    with pytest.raises(UserError, match="1024 tokens, more than"):
        load_tokenizer("python", 256)


def test_learned_pieces_are_the_most_frequent_pairs():
    learned = learn(b" abab abab abab cd", 256 + 3)
    assert learned == [b"ab", b" ab", b" abab"]
    tokens = PieceTokenizer(learned).encode("ababab abab")
    assert tokens.tolist() == [256, 256, 256, 258]
