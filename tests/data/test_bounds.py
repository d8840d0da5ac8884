"""Bounds and small numbers of data, each at its limit and one beyond."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
import pytest

from jshard.data import loader_processes, stream_state
from jshard.data.batches import _filled_up, _rows
from jshard.data.examples import count_items, stack
from jshard.data.iterables import as_stream
from jshard.data.mixture import is_mixture, mix, parse_mixture
from jshard.data.preferences.preference_data import _cut_off
from jshard.data.text import bigram, token_writer
from jshard.data.text.records import Slice
from jshard.data.tokenizers import tokenizer as tokenizers
from jshard.system.errors import UserError
from texts import piece

# Token files.


def test_parts_are_filled_in_order_and_validation_is_apart(tmp_path):
    sizes = {"a": 4, "b": 6, "c": 1, "val": 3, "d": 25}
    for name, size in sizes.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"x" * size)
    files = {tmp_path / f"{name}.jsonl": f"{name}.jsonl" for name in sizes}
    parts = token_writer._plan(token_writer._in_splits(files), 10)
    found = [(x.name, [(y.file.stem, y.size) for y in x.slices]) for x in parts]
    assert found == [
        ("train-00000", [("a", 4), ("b", 6)]),
        ("train-00001", [("c", 1)]),
        ("train-00002", [("d", 10)]),
        ("train-00003", [("d", 10)]),
        ("train-00004", [("d", 5)]),
        ("val-00000", [("val", 3)]),
    ]
    assert parts[0].size == 10
    (tmp_path / "t.txt").write_bytes(b"x" * 25)
    parts = token_writer._plan({tmp_path / "t.txt": "train"}, 10)
    assert [x.size for x in parts] == [10, 10, 5]


def test_a_parts_tokens_and_documents_are_counted(tmp_path):
    part: Any = SimpleNamespace(name="train-00000")
    for ends, count in (([], (0, 0)), ([7], (7, 1)), ([7, 9], (9, 2))):
        np.array(ends, "<u8").tofile(tmp_path / "train-00000.idx")
        assert token_writer._count(tmp_path, part) == count
        assert token_writer._count(tmp_path / "unfinished", part) == count
    assert token_writer._find(tmp_path, "train-00001") is None


def test_progress_is_told_in_megabytes(tmp_path, capsys, monkeypatch):
    file = tmp_path / "a.jsonl"
    parts = [token_writer._Part(str(i), [Slice(file, 0, 1, 2_000_000)]) for i in "abc"]
    monkeypatch.setattr(token_writer, "_PAUSE", -1)
    with token_writer._progress(parts, parts[1:]) as advance:
        advance(parts[1])
        advance(parts[2])
    assert capsys.readouterr().out.splitlines() == [
        "continuing: 2.0 of 6.0 MB are there",
        "4.0 of 6.0 MB",
        "6.0 of 6.0 MB",
    ]
    with token_writer._progress(parts, parts):
        pass
    assert capsys.readouterr().out == ""


# Bigrams, mixtures, pairs.


def test_pairs_are_counted_across_chunks_up_to_the_most(monkeypatch):
    monkeypatch.setattr(bigram, "_CHUNK", 2)
    pieces = [piece(0, 1, 2), piece(1, 2, 0)]
    want = np.zeros((3, 3), int)
    for i, pair in enumerate([(0, 1), (1, 2), (2, 1), (1, 2), (2, 0)], start=1):
        want[pair] += 1
        np.testing.assert_array_equal(bigram.count_pairs(pieces, i, 3), want)
    np.testing.assert_array_equal(bigram.count_pairs(pieces, None, 3), want)
    assert not bigram.count_pairs(pieces, 0, 3).any()


def test_large_vocabularies_have_no_bigram_model(tmp_path, monkeypatch):
    for name in ("a.txt", "val.txt"):
        (tmp_path / name).write_text("to be, or not to be")
    given: dict[str, Any] = {"validation_fraction": 0.1, "token_dtype": "uint16"}
    monkeypatch.setattr(bigram, "_MOST", 256)
    assert bigram.bigram_reference(str(tmp_path), targets=None, **given)
    monkeypatch.setattr(bigram, "_MOST", 255)
    assert bigram.bigram_reference(str(tmp_path), targets=None, **given) == {}
    none = np.zeros((2, 2), int)
    for counts in ((none, none + 1), (none + 1, none)):
        with pytest.raises(ValueError, match="no pair of tokens"):
            bigram.bigram_loss(*counts)


def test_weights_are_above_a_millionth_and_finite():
    sources = {x: grain.MapDataset.range(1000) for x in "ab"}
    mix(sources, {"a": 1.0, "b": 1.1e-6})
    with pytest.raises(UserError, match="b has a weight below a millionth"):
        mix(sources, {"a": 1.0, "b": 0.9e-6})
    for weight in ("0", "inf", "nan", "-1", ""):
        with pytest.raises(UserError, match="must be PATH:WEIGHT"):
            parse_mixture(f"a:{weight}", "data.mixture")
    for given, found in {
        "a:1": True,
        "a": False,
        "hf://a/b": False,
        "a,b:2": True,
    }.items():
        assert is_mixture(given) == found


def test_pairs_held_out_are_the_last_and_neither_split_is_empty():
    pairs: Any = [*range(10)]
    for fraction, count in ((0, 0), (0.01, 1), (0.2, 2), (0.99, 9)):
        held_out = _cut_off(pairs, "validation", fraction)
        assert held_out == pairs[10 - count :]
        assert _cut_off(pairs, "train", fraction) == pairs[: 10 - count]
    assert _cut_off(pairs[:2], "train", 0.9) == [0]
    assert _cut_off(pairs[:1], "train", 0.4) == [0]
    assert _cut_off(pairs[:1], "validation", 0.9) == [0]


# Examples and batches.


def test_tokens_are_integers_of_two_dimensions():
    assert count_items({"x": np.zeros((2, 3), int)}) == ("tokens", 6)
    assert count_items({"x": np.zeros((2, 3))}) == ("examples", 2)
    assert count_items({"x": np.zeros((2, 3, 4), int)}) == ("examples", 2)
    assert count_items({"w": np.zeros(5), "x": np.zeros((5, 3), int)}) == ("tokens", 15)


def test_three_shapes_are_listed_and_more_are_dots():
    for count, dots in ((3, False), (4, True)):
        with pytest.raises(UserError) as error:
            stack([{"x": np.zeros(i)} for i in range(count)])
        assert ("(2,), ...;" in str(error.value)) == dots


def test_a_process_has_its_rows_and_padding_has_no_weight():
    batch = {"x": np.arange(6)}
    assert [_rows(batch, i, 3)["x"].tolist() for i in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    filled = _filled_up(grain.MapDataset.range(3), 5)
    assert [int(filled[i]) for i in range(5)] == [0, 1, 2, 2, 2]


def test_functions_take_no_arguments_or_two():
    def one(a: int) -> None: ...

    def three(a: int, b: int, c: int) -> None: ...

    def two(part: int, parts: int, more: int = 0, *rest: int, key: int = 1) -> list:
        return [part, parts]

    for function in (one, three):
        with pytest.raises(UserError, match="must take no arguments, or two"):
            as_stream(function, repeat=True)
    stream = as_stream(two, repeat=True)
    assert stream is not None
    assert stream.divides
    assert stream.open_part(1, 3) == [1, 3]
    assert not as_stream(lambda more=1: [more], repeat=True).divides  # type: ignore


def test_states_of_all_processes_are_gathered(monkeypatch):
    texts = ["short", "a longer text", ""]
    monkeypatch.setattr(stream_state.jax, "process_count", lambda: 3)

    def gather(mine: Any) -> Any:
        if np.ndim(mine) == 0:
            return np.array([len(x) for x in texts])
        assert len(mine) == max(map(len, texts))
        rows = [np.frombuffer(x.encode(), np.uint8) for x in texts]
        return np.stack([np.pad(x, (0, len(mine) - len(x))) for x in rows])

    monkeypatch.setattr(stream_state.multihost_utils, "process_allgather", gather)
    for text in texts:
        assert stream_state._gathered(text) == texts


# Tokenizers.


@pytest.mark.parametrize("number", [0, 2**31 - 1])
def test_tokens_are_numbered_from_0_below_2_to_the_31(number):
    ids = lambda found: tokenizers._ids(Path("x"), {"a": found}, "a")
    assert ids(number) == [number]
    assert ids([number, 3]) == [number, 3]
    assert ids(None) == []
    for bad in (-1, 2**31, True, "1", 1.0):
        with pytest.raises(UserError, match=r"a is .*, not a token's number"):
            ids([bad])


def test_vocabularies_of_65536_tokens_are_uint16(tmp_path, monkeypatch):
    library = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    for largest, dtype in ((2**16 - 1, np.uint16), (2**16, np.uint32)):
        vocabulary = {"a": 0, "b": largest}
        made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="a"))
        monkeypatch.setattr(tokenizers, "_open", lambda file, made=made: made)
        found = tokenizers.FileTokenizer(file)
        assert (found.vocab_size, found.dtype) == (largest + 1, dtype)


def test_files_of_tokenizers_have_a_limit(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.setattr(tokenizers, "_MOST", 1)
    with pytest.raises(UserError, match="it has 2 bytes"):
        tokenizers._open(file)
    monkeypatch.setattr(tokenizers, "_MOST", 2)
    with pytest.raises(UserError, match=r"not a tokenizer: (?!it has)"):
        tokenizers._open(file)


# Processes.


def test_a_loaders_process_leaves_signals_to_the_run_and_ends_with_it():
    code = f"""
import os, signal, time
exec(open({loader_processes.__file__!r}).read())
read, write = os.pipe()
child = os.fork()
if not child:  # the run, which starts a process and ends
    with opening_loader():
        one = os.fork()
    if not one:
        time.sleep(0.1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(0.1)
        os.write(write, b"still here")
        time.sleep(30)
        os.write(write, b" and after the run")
        os._exit(0)
    other = os.fork()
    if not other:
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(write, b"unless it is forked before")
    if other:
        time.sleep(0.5)
    os._exit(0)
os.close(write)
os.waitpid(child, 0)
found = b""
while part := os.read(read, 100):
    found += part
print(found.decode())
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("still here\n", "")
