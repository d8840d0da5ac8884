"""Which parts of a state each process of several hosts keeps, and who has them."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jshard.storage.checkpoint.local import pieces
from jshard.storage.checkpoint.local.pieces import (
    Division,
    Holders,
    Key,
    Piece,
    divide,
    neighbors,
)


class Device(NamedTuple):
    process_index: int
    number: int


class Placed:
    """A sharding that has shards of each process, by the slices of its device."""

    def __init__(self, *held: tuple[int, slice]):
        self.held = held

    def devices_indices_map(self, shape) -> dict[Any, tuple[slice, ...]]:
        return {
            Device(process, number): (part,)
            for number, (process, part) in enumerate(self.held)
        }


def whole(*processes: int) -> Placed:
    return Placed(*((process, slice(None)) for process in processes))


def state(**arrays: tuple[int, Any]) -> Any:
    """An abstract state of float32 arrays: their sizes, and where they are."""
    made = {}
    for name, (size, placed) in arrays.items():
        made[name] = SimpleNamespace(
            shape=(size,), dtype=np.dtype("float32"), sharding=placed
        )
    return made


@pytest.fixture(autouse=True)
def plain_arrays(monkeypatch) -> None:
    """States are dictionaries of arrays here."""
    monkeypatch.setattr(pieces, "_raw_arrays", lambda state: state)


def halves(first: int, second: int) -> Placed:
    return Placed((first, slice(0, 20)), (second, slice(20, 40)))


LEFT: Key = ("w", ((0, 20),))
RIGHT: Key = ("w", ((20, 40),))


def test_pieces_that_no_other_host_has_come_first_and_begin_at_whole_lines():
    divided = divide(state(b=(3, whole(0, 1)), w=(40, halves(0, 1))), (0, 1))
    bias = ("b", ((0, 3),))
    assert divided.files == [
        {LEFT: Piece(0, 80), bias: Piece(128, 12)},
        {RIGHT: Piece(0, 80), bias: Piece(128, 12)},
    ]
    assert [*divided.files[0]] == [LEFT, bias]
    assert divided.alone == [128, 128]
    assert divided.sizes == [192, 192]


def test_what_both_processes_of_one_host_have_no_other_host_has():
    divided = divide(state(b=(3, whole(0, 1)), w=(16, whole(2))), (0, 0, 1))
    assert divided.alone == [64, 64, 64]
    assert divided.sizes == [64, 64, 64]
    assert divide(state(b=(3, whole(0, 2))), (0, 0, 1)).alone == [0, 0, 0]


def test_a_division_has_a_name_that_tells_it_from_others():
    one = divide(state(w=(40, halves(0, 1))), (0, 1))
    assert len(one.digest) == 16
    assert divide(state(w=(40, halves(0, 1))), (0, 1)).digest == one.digest
    others = [
        divide(state(w=(40, halves(1, 0))), (0, 1)),
        divide(state(w=(41, halves(0, 1))), (0, 1)),
        divide(state(v=(40, halves(0, 1))), (0, 1)),
    ]
    assert all(other.digest != one.digest for other in others)


DIVISION = Division(
    files=[
        {LEFT: Piece(0, 80), ("b", ((0, 3),)): Piece(128, 12)},
        {RIGHT: Piece(0, 80), ("b", ((0, 3),)): Piece(128, 12)},
    ],
    alone=[128, 128],
    sizes=[192, 192],
    digest="",
)
BIAS: Key = ("b", ((0, 3),))


def test_of_each_process_all_must_be_somewhere():
    def missing(first, second):
        return Holders(DIVISION, {0: first, 1: second}).missing()

    assert missing([(0, 192)], [(1, 192)]) == []
    assert missing([], [(1, 192)]) == [0]
    assert missing([(1, 128)], [(1, 192)]) == []  # the rest is in its own file
    assert missing([(1, 128)], [(0, 128)]) == [0, 1]  # no one has the bias
    assert missing([(1, 79)], [(1, 192)]) == [0]
    assert missing([(1, 80)], [(1, 192)]) == []
    # Its own texts are nowhere, though another has all its pieces.
    both = Division([{BIAS: Piece(0, 12)}] * 2, [0, 0], [64, 64], "")
    assert Holders(both, {0: [(0, 64)], 1: []}).missing() == [1]


def test_a_piece_is_taken_from_here_or_from_who_has_it():
    def source(process, key, first, second):
        return Holders(DIVISION, {0: first, 1: second}).source(process, key)

    assert source(0, LEFT, [(1, 128), (0, 192)], []) == (0, 0)
    assert source(0, LEFT, [(1, 128)], [(1, 192)]) == (1, 0)
    assert source(0, BIAS, [(1, 128)], [(1, 192)]) == (1, 1)
    assert source(0, BIAS, [(1, 139)], [(1, 140)]) == (1, 1)
    assert source(0, BIAS, [(1, 140)], [(1, 192)]) == (1, 0)
    assert source(1, LEFT, [(0, 192)], []) == (0, 0)
    assert source(1, BIAS, [(0, 192)], [(0, 128)]) == (0, 0)
    assert source(0, RIGHT, [(0, 192)], []) is None
    # A process of a third host that has it, too.
    three = {0: [(2, 128)], 1: [], 2: []}
    division = Division([*DIVISION.files, {}], [128, 128, 0], [192, 192, 0], "")
    assert Holders(division, three).source(0, LEFT) == (2, 0)
    three[0] = [(1, 128), (2, 128)]
    assert Holders(division, three).source(2, LEFT) == (2, 0)
    assert Holders(division, three).source(0, LEFT) == (1, 0)


def test_what_a_process_takes_is_grouped_by_who_has_it():
    found = Holders(DIVISION, {0: [(1, 128)], 1: [(1, 192)]})
    assert found.sources(0) == {(1, 0): [LEFT], (1, 1): [BIAS]}
    assert found.sources(1) == {(1, 1): [RIGHT, BIAS]}
    with pytest.raises(ValueError, match="no process has"):
        Holders(DIVISION, {0: [], 1: []}).sources(0)


def test_a_neighbor_is_a_process_of_the_next_host():
    assert neighbors((0,)) == [None]
    assert neighbors((5, 5)) == [None, None]
    assert neighbors((0, 0, 0, 1, 1)) == [3, 4, 3, 0, 1]
    assert neighbors((2, 0, 1)) == [1, 2, 0]


def test_shards_of_one_state_come_back_as_they_were(monkeypatch):
    monkeypatch.undo()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P("fsdp", None))
    plain = jax.NamedSharding(mesh, jax.P())
    values: Any = {
        "w": jax.device_put(np.arange(32, dtype=np.float32).reshape(16, 2), sharded),
        "n": jax.device_put(np.int32(7), plain),
        "key": jax.device_put(jax.random.key(3), plain),
    }
    divided = divide(values, (0,))
    assert divided.alone == divided.sizes
    stored = np.zeros(divided.sizes[0], np.uint8)

    def write(start, data):
        stored[start : start + data.size] = data

    pieces.copy_shards(values, divided.files[0], write)

    def read(key):
        piece = divided.files[0][key]
        return stored[piece.start : piece.start + piece.size]

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values
    )
    made: Any = pieces.assemble(abstract, read)
    stored[:] = 255  # the arrays are none of these bytes
    np.testing.assert_array_equal(made["w"], np.arange(32).reshape(16, 2))
    assert made["w"].sharding == sharded
    assert int(made["n"]) == 7
    assert jax.random.key_data(made["key"]).tolist() == [0, 3]
    assert made["key"].dtype == values["key"].dtype
