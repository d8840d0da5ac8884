"""Streams of every kind that a recipe may give, of the same rows."""

from typing import Any

import grain
import numpy as np

from jshard.data.dataset import as_dataset
from jshard.data.iterables import Stream

ROWS = [{"x": i, "y": [i, -i]} for i in range(23)]
STEPS = 12


class Counted:
    """Rows, of which it notes how many were read; its iterator has a state."""

    def __init__(self, rows: Any = ROWS):
        self.rows, self.read = rows, 0

    def __iter__(self):
        return CountedIterator(self)


class CountedIterator:
    def __init__(self, of):
        self.of, self.at = of, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.of.rows):
            raise StopIteration
        self.at += 1
        self.of.read += 1
        return self.of.rows[self.at - 1]

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Loader:
    """As torchdata's loader and `datasets`: told its state before `iter()`."""

    def __init__(self, rows: Any = ROWS):
        self.rows, self.at, self.next_at = rows, 0, 0

    def __iter__(self):
        self.at, self.next_at = self.next_at, 0
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def state_dict(self):
        return {"at": np.int64(self.at), "rng": (b"\0\xff", np.arange(3))}

    def load_state_dict(self, state):
        assert state["rng"][0] == b"\0\xff"
        np.testing.assert_array_equal(state["rng"][1], np.arange(3))
        self.next_at = state["at"]


def divided(part, parts):
    return Counted(ROWS[part::parts])


def in_order(part, parts):
    return iter(ROWS[part::parts])


def packed() -> grain.IterDataset:
    """What a language model may read: a mixture of shuffled, packed documents."""
    rows = grain.MapDataset.source(range(1, 50)).seed(3)
    documents = rows.map(lambda i: {"tokens": np.full(1 + i % 7, i)}).to_iter_dataset()
    one = grain.experimental.WindowShuffleIterDataset(documents, window_size=9, seed=1)
    one = grain.experimental.FirstFitPackIterDataset(
        one, length_struct={"tokens": 8}, num_packing_bins=3
    )
    other = grain.experimental.ConcatThenSplitIterDataset(
        documents, length_struct={"tokens": 8}
    )
    return grain.IterDataset.mix([one, other], [0.7, 0.3])


def grain_loader() -> grain.DataLoader:
    return grain.DataLoader(
        data_source=ROWS,
        sampler=grain.samplers.IndexSampler(
            len(ROWS), grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=5
        ),
    )


SOURCES: dict[str, Any] = {
    "iterator": lambda: CountedIterator(Counted()),
    "iterable": Counted,
    "loader": Loader,
    "function": lambda: lambda: Counted(),
    "divided": lambda: divided,
    "divided, without a state": lambda: in_order,
    "without a state": lambda: lambda: iter(ROWS),
    "grain": lambda: grain.MapDataset.source(ROWS).seed(1).shuffle().to_iter_dataset(),
    "grain, packed and mixed": packed,
    "grain's loader": grain_loader,
}


def open_stream(source: Any) -> Stream:
    stream = as_dataset(source, 0, repeat=True)
    assert isinstance(stream, Stream)
    return stream
