"""A part of a stream: items that are batches of any size, joined, cut and resumed."""

from typing import Any

import numpy as np
import pytest

from jshard.data import stream_state
from jshard.data.stream_reader import PartReader, StreamState, _difference
from jshard.system.errors import UserError
from jshard.system.files.untrusted import MOST_JSON


class Batches:
    """A cursor whose items are batches of these sizes, of the numbers from 0 on."""

    batched, resumes = True, True

    def __init__(self, *sizes: int):
        ends = np.cumsum(sizes).tolist()
        pairs = zip(ends, sizes, strict=True)
        self.items = [{"x": np.arange(end - size, end)} for end, size in pairs]
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state(self):
        return self.at

    def restore(self, state):
        self.at = state


def part(size: int, *sizes: int) -> PartReader:
    cursor: Any = Batches(*sizes)
    return PartReader(cursor, size)


def numbers(reader: PartReader) -> list[list[int]]:
    return [batch["x"].tolist() for batch in reader]


@pytest.mark.parametrize("sizes", [(7, 5), (1, 1, 10), (12,), (3, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_part_goes_on_within_an_item_however_often_it_is_resumed(size, sizes):
    whole = numbers(part(size, *sizes))
    assert [i for batch in whole for i in batch] == list(range(12))
    assert {len(batch) for batch in whole[:-1]} <= {size}
    state, found = part(size, *sizes).state(), []
    while True:
        reader = part(size, *sizes)  # anew for each batch
        reader.restore(state)
        assert reader.state() == state
        batch = next(reader, None)
        if batch is None:
            break
        found.append(batch["x"].tolist())
        state = reader.state()
    assert found == whole


def test_a_state_names_the_item_and_the_rows_used_of_it():
    reader = part(2, 5, 4)
    found = []
    for _ in range(4):
        next(reader)
        found.append(reader.state())
    assert found == [
        {"before": 0, "used": 2},
        {"before": 0, "used": 4},
        {"before": 1, "used": 1},
        {"before": 1, "used": 3},
    ]
    next(reader)
    assert reader.state() == {"before": 2, "used": 0}


def test_batches_that_cannot_be_joined_are_a_users_error():
    reader = part(4, 2, 2)
    reader._cursor.items[1] = {"y": np.arange(2)}  # pyright: ignore
    with pytest.raises(UserError, match="batches differ in structure or shapes"):
        next(reader)


def test_what_differs_in_two_states_is_said_by_its_place():
    found = {"a": [{"x": 1}, {"y": 2}], "b": 3}
    assert _difference(found, found | {"b": 4}) == ""
    assert _difference(found, found | {"c": 4}) == "its keys: ['c']"
    assert _difference(found, found | {"a": [{"x": 1}]}) == "['a']: 2, not 1"
    shorter = found | {"a": [{"x": 1}, {}]}
    assert _difference(found, shorter) == "['a'][1]: ['y']"
    # What is None, or numbers alone, may be something else later.
    assert _difference(found, found | {"a": None}) == ""
    assert _difference(found | {"a": [1, 2]}, found | {"a": [1]}) == ""


def test_a_large_state_is_read_again_and_a_larger_one_refused_at_its_save(
    tmp_path, monkeypatch
):
    assert stream_state.MOST > MOST_JSON
    state = StreamState("an iterator", 1, {0: {"buffer": np.zeros(2**16, np.uint8)}})
    monkeypatch.setattr(stream_state, "MOST", 10**5)
    for name, text in stream_state.state_files(state).items():
        (tmp_path / name).write_text(text)
    read = stream_state.read_state(tmp_path)
    assert read is not None
    np.testing.assert_array_equal(read.of_part[0]["buffer"], np.zeros(2**16))
    monkeypatch.setattr(stream_state, "MOST", 10**4)
    with pytest.raises(UserError, match=r"the state of an iterator takes 85\.\d KiB"):
        stream_state.state_files(state)
