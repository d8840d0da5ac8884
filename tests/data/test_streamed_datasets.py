"""Datasets of Hugging Face, streamed: what is held out, divided, cut and packed.

The library is a stand-in here; tests/huggingface has it.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jshard.data import fingerprint
from jshard.data.iterables import part_of
from jshard.data.preferences.preference_data import named_preference_data
from jshard.data.stream_reader import StreamReader
from jshard.data.text import named_dataset, streamed_text
from jshard.data.text.named_dataset import NamedDataset, Split
from jshard.system.errors import UserError

HELLO = [f"text {i}" for i in range(12)]


class Rows:
    """As an `IterableDataset`: rows of several files, some of which are read."""

    def __init__(self, *files: list[Any]):
        self.files, self.num_shards = files, len(files)
        rows = [row for file in files for row in file]
        self.column_names = list(rows[0]) if rows else None

    def shard(self, count: int, index: int, contiguous: bool = True) -> "Rows":
        assert not contiguous or count == 1
        return Rows(*self.files[index::count])

    def __iter__(self):
        return iter([row for file in self.files for row in file])

    def take(self, count: int) -> "Rows":
        return Rows(list(self)[:count])

    def skip(self, count: int) -> "Rows":
        return Rows(list(self)[count:])


@pytest.fixture
def dataset(monkeypatch):
    """Makes what a name loads; of files, unless there are as many, every nth row."""
    by_node = lambda rows, part, parts: Rows(list(rows)[part::parts])
    node = SimpleNamespace(split_dataset_by_node=by_node)
    monkeypatch.setitem(sys.modules, "datasets.distributed", node)

    def make(**splits: Rows) -> None:
        found = {name: Split(rows, {"rows": name}) for name, rows in splits.items()}
        for module in (named_dataset,):
            monkeypatch.setattr(module, "load_splits", lambda name, config: found)

    return make


def rows(*texts: str) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def texts_of(found: Any) -> list[str]:
    return [row["text"] for row in found]


def test_with_files_enough_a_part_is_every_nth_file_and_else_every_nth_row(dataset):
    dataset()
    files = [rows(f"{name}0", f"{name}1") for name in "abc"]
    assert texts_of(part_of(Rows(*files), 1, 3)) == ["b0", "b1"]
    assert texts_of(part_of(Rows(*files), 0, 2)) == ["a0", "a1", "c0", "c1"]
    assert texts_of(part_of(Rows(*files), 1, 4)) == ["a1", "c1"]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("files", [1, 2, 3])
def test_rows_to_validate_with_are_the_first_and_no_part_has_them(
    dataset, files, parts
):
    dataset(train=Rows(*(rows(*HELLO[i::files]) for i in range(files))))
    source = NamedDataset("name", "", "train", 2)
    held_out = texts_of(source.held_out())
    assert held_out == HELLO[::files][:2]
    trained = [texts_of(source.trained_part(i, parts)) for i in range(parts)]
    found = [text for part in trained for text in part]
    assert sorted(found + held_out) == sorted(HELLO)
    assert NamedDataset("name", "", "train", 0).trained_part().files
    assert source.fingerprint == {"rows of name": "train"}


def test_a_validation_split_of_its_own_is_held_out_and_all_rows_are_trained_on(dataset):
    dataset(train=Rows(rows("a", "b")), validation=Rows(rows("c", "d", "e")))
    source = NamedDataset("name", "", "train", 2)
    assert texts_of(source.held_out()) == ["c", "d"]
    assert texts_of(source.trained_part()) == ["a", "b"]
    with pytest.raises(UserError, match=r"has no split 'test'; set data\.split"):
        NamedDataset("name", "", "test", 2)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_rows_to_validate_with_are_of_the_first_file_that_has_some(dataset, parts):
    dataset(train=Rows([], rows(*"abcd"), rows(*"ef")))
    source = NamedDataset("name", "", "train", 2)
    assert texts_of(source.held_out()) == ["a", "b"]
    trained = [texts_of(source.trained_part(i, parts)) for i in range(parts)]
    assert sorted(text for part in trained for text in part) == [*"cdef"]
    dataset(train=Rows([], []))
    with pytest.raises(UserError, match=r"data\.dataset=name: has no rows"):
        NamedDataset("name", "", "train", 2).held_out()


@pytest.mark.parametrize("error", [StopIteration, IndexError])
def test_an_empty_file_that_should_say_the_columns_is_named_as_the_cause(
    monkeypatch, error
):
    def build(*args: Any, **options: Any) -> Any:
        raise error  # as builders of JSON and WebDataset do

    exceptions = SimpleNamespace(DatasetsError=ValueError)
    library = SimpleNamespace(load_dataset_builder=build, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(UserError, match="folder: a file that should say its col"):
        named_dataset.load_splits("folder", "")


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{}, {"shuffle_rows": 3}, {"pack": True}])
def test_texts_that_are_all_empty_are_an_error_and_no_endless_search(dataset, options):
    dataset(train=Rows(rows("held", *[""] * 5)))
    with pytest.raises(UserError, match="name: no row has a text to train on; set"):
        read(windows(**options), 1)
    dataset(train=Rows(rows("held", *[""] * 50, "abcdefgh")))
    assert read(windows(**options), 3)


def test_a_part_repeats_its_rows_and_goes_on_where_it_was(dataset):
    dataset(train=Rows(rows(*"abcde")))
    source = NamedDataset("name", "", "train", 1)
    assert texts_of(
        row for row, _ in zip(source.part(0, 1, 0, 0), range(9), strict=False)
    ) == [*"bcdebcdeb"]
    orders = [
        [x["text"] for x, _ in zip(source.part(0, 1, 4, seed), range(4), strict=False)]
        for seed in range(6)
    ]
    assert all(sorted(order) == [*"bcde"] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def windows(dataset: str = "name", split: str = "train", **options: Any) -> Any:
    given: dict[str, Any] = {"sequence_length": 4, "seed": 0, "shuffle_rows": 0}
    given |= {"validation_rows": 1, **options}
    return streamed_text.streamed_text(dataset, split, **given)


def read(stream: Any, count: int, size: int = 1) -> list[Any]:
    return list(StreamReader(stream, batch_size=size, start_step=0, num_steps=count))


def test_texts_are_cut_to_windows_across_documents(dataset):
    dataset(train=Rows(rows("held", "", "abcdef", "ghi")))
    found = [batch["inputs"][0] for batch in read(windows(), 3)]
    targets = [batch["targets"][0] for batch in read(windows(), 3)]
    assert [bytes(x.tolist()) for x in found] == [b"abcd", b"f\0gh", b"\0abc"]
    assert [bytes(x.tolist()) for x in targets] == [b"bcde", b"\0ghi", b"abcd"]
    held_out = windows(split="validation")
    assert [bytes(x["inputs"].tolist()) for x in held_out] == [b"held"]
    assert held_out[0]["weights"].tolist() == [1, 1, 1, 1]
    assert windows(split="validation", validation_rows=0) is None


def test_packed_rows_hold_places_of_whole_documents(dataset):
    dataset(train=Rows(rows("held", "ab", "c", "defghijk")))
    stream = windows(pack=True, sequence_length=4)
    found = read(stream, 8)
    seen = set()
    for batch in found:
        row = {name: x[0] for name, x in batch.items()}
        for segment in range(1, row["segment_ids"].max() + 1):
            at = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][at], range(at.sum()))
            seen.add(
                (bytes(row["inputs"][at].tolist()), bytes(row["targets"][at])[::4])
            )
        np.testing.assert_array_equal(row["weights"], row["segment_ids"] > 0)
    assert seen == {
        (b"ab", b"b\0"),
        (b"c", b"\0"),
        (b"defg", b"efgh"),
        (b"hijk", b"ijk\0"),
    }
    stream = windows(pack=True, sequence_length=4, max_segments=2)
    assert max(x["segment_ids"].max() for x in read(stream, 8)) == 1


def test_columns_that_are_missing_are_one_line(dataset):
    dataset(train=Rows([{"body": "a", "id": 3}]))
    with pytest.raises(UserError, match=r"no column 'text'; set data\.text_key"):
        windows()
    with pytest.raises(UserError, match="'id' of a row is a int, not a text; set"):
        windows(split="validation", text_key="id")
    dataset(train=Rows(rows("", "a")))
    with pytest.raises(UserError, match="has no text for validation"):
        windows(split="validation")
    dataset(train=Rows([{"messages": []}]))
    with pytest.raises(UserError, match="chats are packed as whole documents"):
        windows(split="validation")
    dataset(train=Rows(rows("ab", "cd")))
    assert len(windows(split="validation")) == 1  # two tokens and an end


def test_datasets_are_mixed_by_weight(dataset, monkeypatch):
    made = {"a": Rows(rows("held", "a" * 40)), "b": Rows(rows("held", "b" * 40))}
    load = lambda name, config: {"train": Split(made[name], {"rows": name})}
    monkeypatch.setattr(named_dataset, "load_splits", load)
    mixed = windows("a:3,b:1", shuffle_rows=0)
    assert mixed.fingerprint == {"rows of a": "a", "rows of b": "b"}
    counts = [int((x["inputs"] == ord("a")).any()) for x in read(mixed, 40)]
    assert sum(counts) == 30
    assert len(windows("a:1,b:1", "validation")) == 2


def test_pairs_of_a_dataset_are_kept_or_streamed(dataset):
    pairs = [{"chosen": f"a {x}", "rejected": "a z"} for x in "bcd"]
    dataset(train=Rows(pairs))

    def named(split: str = "train", **options: Any) -> Any:
        given = {"sequence_length": 8, "seed": 0, "tokenizer": "", "shuffle_rows": 0}
        given |= {"validation_rows": 1}
        return named_preference_data("name", split, **given | options)

    def chosen(example: Any) -> str:
        inputs, texts = (example[x].reshape(-1, 2)[:, 0] for x in ("inputs", "texts"))
        return bytes(inputs[texts].tolist()).decode()

    assert chosen(named("validation")[0]) == "a b"
    assert len(named("validation")) == 1
    kept = named(kept=True)
    assert {chosen(kept[i]) for i in range(4)} == {"a c", "a d"}
    streamed = [{k: x[0] for k, x in b.items()} for b in read(named(), 3)]
    assert [*map(chosen, streamed)] == ["a c", "a d", "a c"]
    assert named("validation", validation_rows=0) is None
    assert "split train" in named().kind


def test_the_fingerprint_of_files_is_that_of_names_and_sizes(tmp_path):
    a, b = (str(tmp_path / name) for name in "ab")
    for name, size in ((a, 3), (b, 4)):
        with open(name, "wb") as stream:
            stream.write(bytes(size))
    found = fingerprint.of_files([a, b, "hf://x@1"])
    assert found["the files"].startswith("3 (digest ")
    assert fingerprint.of_files([a, b, "hf://x@1"]) == found
    assert fingerprint.of_files([b, a, "hf://x@1"]) != found
    assert fingerprint.of_files([a, b, "hf://x@2"]) != found
    with open(b, "ab") as stream:
        stream.write(b"x")
    assert fingerprint.of_files([a, b, "hf://x@1"]) != found
    assert fingerprint.of_files([]) == {}


def test_what_differs_is_named_if_both_know_it():
    now, then = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "5", "d": "4"}
    assert fingerprint.difference(now, then) == "b: 2, but 5 at the checkpoint"
    assert fingerprint.difference(now, now) == ""
    assert fingerprint._short(["x" * 60]) == "x" * 60
    long = fingerprint._short(["x" * 61])
    assert long.startswith("x" * 60 + "... (")
    assert fingerprint._short(["x" * 60 + "y"]) != long


@pytest.mark.parametrize(
    ("config", "named"),
    [("", "data.dataset=o/a: "), ("en", "data.dataset=o/a, data.config=en: ")],
)
def test_what_the_library_refuses_is_one_line_that_names_the_keys(
    monkeypatch, config, named
):
    def load_dataset_builder(*_, **__):
        raise ValueError("BuilderConfig 'en'\nnot found")

    library = SimpleNamespace(
        load_dataset_builder=load_dataset_builder,
        exceptions=SimpleNamespace(DatasetsError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(UserError) as error:
        named_dataset.load_splits.__wrapped__("o/a", config)
    (line,) = str(error.value).splitlines()
    assert line.startswith(named)
    assert "not found" in line
