"""Bounds and small numbers of text, each at its limit and one beyond."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jshard.data.files.record_forms import with_records
from jshard.data.text import encoded, records
from jshard.data.text.packing import _documents, _spans, best_fit
from jshard.data.text.packing import _rows as rows_of
from jshard.data.text.records import Slice, cut, read_texts
from jshard.data.text.token_files import make_header, map_tokens
from jshard.data.text.windows import read_tokens
from jshard.data.tokenizers.tokenizer import ByteTokenizer
from jshard.system.errors import UserError
from texts import piece, text, tokens_of, window, write_tokens

# Tokens and windows.


def test_the_shortest_split_is_a_window_to_train_on_and_two_tokens_to_validate(
    tmp_path,
):
    nine = write_tokens(tmp_path / "a.bin", 9)
    assert window(text(nine, validation_fraction=0), 0)["inputs"].tolist() == [
        *range(8)
    ]
    two = write_tokens(tmp_path / "b.bin", 100)
    held_out = text(two, "validation", validation_fraction=0.02)
    assert tokens_of(held_out).tolist() == [98, 99]
    with pytest.raises(UserError, match="validation split has 1 tokens but needs 2"):
        text(two, "validation", validation_fraction=0.01)
    one = text(two, sequence_length=1, validation_fraction=0)
    assert window(one, 0)["inputs"].shape == (1,)
    packed = write_tokens(tmp_path / "c.bin", 3)
    np.array([3], np.uint64).tofile(tmp_path / "c.idx")
    row = window(text(packed, pack=True, validation_fraction=0), 0)
    assert row["weights"].sum() == 2


def test_seeds_and_fractions_at_their_limits_are_valid(tmp_path):
    file = write_tokens(tmp_path / "a.bin", 40)
    for seed in (0, 2**32 - 1):
        window(text(file, seed=seed, validation_fraction=0), 0)
    with pytest.raises(UserError, match="seed=4294967296: use"):
        text(file, seed=2**32)
    for most in (0, 2):
        np.array([20, 40], np.uint64).tofile(tmp_path / "a.idx")
        window(text(file, pack=True, max_segments=most, validation_fraction=0), 0)
    with pytest.raises(UserError, match="max_segments=-1: padding is one"):
        text(file, pack=True, max_segments=-1)
    mixture = f"{file}:1"
    window(text("", mixture=mixture, seed=2**32 - 1, validation_fraction=0), 0)


def test_a_whole_last_window_is_not_followed_by_an_empty_one(tmp_path):
    file = write_tokens(tmp_path / "a.bin", 100)
    for tokens, windows in ((17, 2), (18, 3), (16, 2), (9, 1), (10, 2)):
        held_out = text(file, "validation", validation_fraction=tokens / 100)
        assert len(held_out) == windows
        assert len(tokens_of(held_out)) == tokens


def test_the_largest_token_is_the_limit_less_one():
    assert read_tokens(piece(2**31 - 1), 0, 1, None).tolist() == [2**31 - 1]
    with pytest.raises(UserError, match="token 2147483648 at position 0 is not below"):
        read_tokens(piece(2**31), 0, 1, None)
    assert read_tokens(piece(6), 0, 1, 7).tolist() == [6]
    part = piece(*range(10), start=2, stop=6)
    assert part.read(1, 3).tolist() == [3, 4]
    assert part.read(1, 9).tolist() == [3, 4, 5]
    with pytest.raises(UserError, match="token 4 at position 4 is not below"):
        read_tokens(part, 1, 3, 4)


def test_headers_are_256_numbers_of_which_three_say_something(tmp_path):
    header = make_header("uint16", 40)
    assert len(header) == 1024
    assert np.frombuffer(header, "<i4")[:4].tolist() == [20240520, 1, 40, 0]
    assert not any(np.frombuffer(header, "<i4")[3:])
    file = tmp_path / "a.bin"
    file.write_bytes(header + bytes(80))
    found = map_tokens(file, "a", "uint16")
    assert (found.start, found.stop, found.load().tolist()) == (0, 40, [0] * 40)
    file.write_bytes(make_header("uint16", 0))
    with pytest.raises(UserError, match="the file is empty"):
        map_tokens(file, "a", "uint16")
    for size in (79, 81, 82):
        file.write_bytes(header + bytes(size))
        with pytest.raises(UserError, match="header says 40 tokens of uint16"):
            map_tokens(file, "a", "uint16")
    file.write_bytes(make_header("uint16", -1) + bytes(80))
    with pytest.raises(UserError, match="header says -1 tokens"):
        map_tokens(file, "a", "uint16")
    file.write_bytes(bytes(80))
    np.array([30, 40], np.uint64).tofile(tmp_path / "a.idx")
    (tmp_path / "a.trained").write_bytes(bytes([1, 0] * 20))
    found = map_tokens(file, "a", "uint16")
    assert found.ends is not None
    assert found.ends().tolist() == [30, 40]
    assert np.asarray(found.read_weights(1, 3)).tolist() == [False, True]
    assert np.asarray(found.read_weights(38, 50)).tolist() == [True, False]
    for damage in (b"", bytes(7), np.array([30, 39], np.uint64).tobytes() + b"1"):
        (tmp_path / "a.idx").write_bytes(damage)
        with pytest.raises(UserError, match="does not end at the 40 tokens"):
            map_tokens(file, "a", "uint16")


# Records and their slices.


def test_lines_in_compressed_files_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_LINE", 20)
    file = tmp_path / "a.jsonl.gz"
    for size, fits in ((20, True), (21, False)):
        line = json.dumps({"text": "x" * (size - 13)}) + "\n"
        assert len(line) == size
        file.write_bytes(gzip.compress(b'{"text": ""}\n' + line.encode()))
        (part,) = cut(file, 5)
        if fits:
            assert [*read_texts(part, "text")] == ["", "x" * 7]
        else:
            with pytest.raises(UserError, match="byte 13 is longer than 20 bytes"):
                list(read_texts(part, "text"))


def test_slices_make_up_a_file(tmp_path):
    file = tmp_path / "a.txt"
    for size in (0, 1, 9, 10, 11, 25):
        file.write_bytes(b"x" * size)
        found = cut(file, 10)
        assert [(x.start, x.stop) for x in found] == [
            (i, min(i + 10, size)) for i in range(0, size, 10)
        ]
        assert sum(x.size for x in found) == size
    whole = tmp_path / "a.jsonl.gz"
    whole.write_bytes(b"x" * 25)
    assert cut(whole, 10) == [Slice(whole, 0, 1, 25)]


def test_what_a_saved_dataset_names_is_read_and_nothing_beside_it(tmp_path):
    data = [tmp_path / name for name in ("data.jsonl", "cache.jsonl")]
    for file in data:
        file.write_text("{}")
    other = tmp_path / "sub" / "c.jsonl"
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "data.jsonl"}]}))
    assert with_records([*data, other, state]) == [data[0], other]
    state.write_text(json.dumps({"_data_files": [{"filename": "gone.jsonl"}]}))
    with pytest.raises(UserError, match=r"gone\.jsonl: is missing; .*state\.json name"):
        with_records([*data, state])
    for bad in ({"a": 1}, ["data.jsonl"], [{}]):
        state.write_text(json.dumps({"_data_files": bad}))
        with pytest.raises(UserError, match="_data_files are not those of a dataset"):
            with_records([*data, state])
    splits = tmp_path / "dataset_dict.json"
    splits.write_text(json.dumps({"splits": "train"}))
    with pytest.raises(UserError, match="its splits are not a list"):
        with_records([splits])


def test_texts_are_tokenized_a_million_characters_at_a_time(monkeypatch):
    monkeypatch.setattr(encoded, "_BATCH", 4)
    texts = [(Path(), x) for x in ("ab", "", "cd", "e", "fghij", "k", "")]
    found = [[x for _, x in batch] for batch in encoded._batches(texts)]
    assert found == [["ab", "cd"], ["e", "fghij"], ["k"]]
    assert not list(encoded._batches([(Path(), "")]))


def test_much_text_at_every_start_is_warned_of(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 10)
    monkeypatch.setattr(encoded, "_MUCH", 10)
    (found,) = encoded.encode_files([file], ByteTokenizer(), "text")
    assert (found.start, found.stop, found.ends) == (0, 11, None)
    monkeypatch.setattr(encoded, "_MUCH", 9)
    with pytest.warns(UserWarning, match="every process tokenizes") as told:
        encoded.encode_files([file], ByteTokenizer(), "text")
    assert [x.filename for x in told] == [__file__]
    two = encoded.joined(file, [encoded.Document(file, np.arange(n)) for n in (2, 3)])
    assert two.ends is not None
    assert two.ends().tolist() == [2, 5]


# Packing.


def test_documents_are_cut_to_places_at_exact_lengths():
    def spans(T: int, *ends: int) -> list[tuple[int, int, int]]:
        found = _spans([piece(*range(ends[-1]), ends=ends)], T)
        return list(zip(*(x.tolist() for x in found), strict=True))

    assert spans(4, 5) == [(0, 0, 4)]
    assert spans(4, 6) == [(0, 0, 4), (0, 4, 1)]
    assert spans(4, 1) == []  # a token alone has no target
    assert spans(4, 2) == [(0, 0, 1)]
    assert spans(4, 3, 12) == [(0, 0, 2), (0, 3, 4), (0, 7, 4)]
    numbers = _spans([piece(1, 2), piece(1, 2, 3)], 4)[0]
    assert numbers.tolist() == [0, 1]
    starts, stops = _documents(piece(*range(9), ends=[2, 5, 9], start=3, stop=7))
    assert (starts.tolist(), stops.tolist()) == ([0, 2], [2, 4])
    starts, stops = _documents(piece(*range(9), start=3, stop=7))
    assert (starts.tolist(), stops.tolist()) == ([0], [4])


def test_a_document_takes_the_fullest_row_that_it_fits():
    assert best_fit(np.array([5, 4, 3, 2]), 8).tolist() == [0, 1, 0, 1]
    assert best_fit(np.array([8, 8]), 8).tolist() == [0, 1]
    assert best_fit(np.array([6, 5, 3, 2]), 8).tolist() == [0, 1, 1, 0]
    assert best_fit(np.array([2, 2, 2, 2]), 8).tolist() == [0, 0, 0, 0]
    assert best_fit(np.array([2, 2, 2, 2]), 8, most=2).tolist() == [0, 0, 1, 1]
    assert best_fit(np.array([2, 2, 2]), 8, most=1).tolist() == [0, 1, 2]
    assert best_fit(np.array([1, 7]), 8).tolist() == [0, 0]
    order, bounds = rows_of(np.array([1, 0, 1, 2, 0]))
    assert order.tolist() == [0, 2, 1, 4, 3]  # rows by their first documents
    assert bounds.tolist() == [0, 2, 4, 5]
