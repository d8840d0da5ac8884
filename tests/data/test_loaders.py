"""PyTorch's loaders as streams, with a stand-in for torch: batches of any size."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jshard.data import fingerprint
from jshard.data.iterables import Stream, as_stream
from jshard.data.places import Cursor
from jshard.data.stream_reader import StreamReader
from jshard.system.errors import UserError


class Generator:
    """Of random numbers: its seed is what it was given last."""

    def __init__(self, seed: int):
        self.seed = seed

    def initial_seed(self) -> int:
        return self.seed

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


class DataLoader:
    """Of 10 rows in batches, turned by the generator's seed; it has a state."""

    def __init__(self, size: int = 3, seed: int | None = None, **sampler: Any):
        self.dataset = [*range(10)]
        self.batch_size, self.num_workers = size, 0
        self.generator = None if seed is None else Generator(seed)
        self.sampler = SimpleNamespace(**sampler)
        self.at = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        turn = self.generator.seed if self.generator else 0
        rows, start, self.at = np.roll(self.dataset, turn), self.at, 0
        for first in range(start, 10, self.batch_size):
            self.at = min(first + self.batch_size, 10)
            yield [rows[first : self.at]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class RandomSampler:
    generator: Any = None


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    class IterableDataset: ...

    module = SimpleNamespace(DataLoader=DataLoader, IterableDataset=IterableDataset)
    monkeypatch.setitem(sys.modules, "torch.utils.data", module)


def stream(loader: Any) -> Stream:
    found = as_stream(loader, repeat=True)
    assert found is not None
    return found


def read(loader: Any, **options: Any) -> tuple[list[list[int]], Any]:
    given: dict[str, Any] = {"batch_size": 4, "start_step": 0, "num_steps": 6}
    reader = StreamReader(stream(loader), **given | options)
    found, states = [], []
    for batch in reader:
        found.append(batch[0].tolist())
        states.append(reader.get_state())
    return found, states


def test_batches_are_joined_and_cut_to_the_runs_and_go_on_within_one():
    whole, states = read(DataLoader())
    assert [row for batch in whole for row in batch] == [
        *range(10),
        *range(10),
        *range(4),
    ]
    assert states[0].of_part[0] == {
        "before": {"epoch": 0, "source": {"at": 3}},
        "used": 1,
    }
    for step, state in enumerate(states[:-1], start=1):
        assert read(DataLoader(), state=state, start_step=step)[0] == whole[step:]


def test_each_epoch_has_its_seed_and_a_resumed_run_the_same():
    whole, states = read(DataLoader(size=5, seed=1), batch_size=5)
    epochs = [whole[i] + whole[i + 1] for i in (0, 2, 4)]
    assert epochs == [np.roll(range(10), seed).tolist() for seed in (1, 2, 3)]
    for step, state in enumerate(states[:-1], start=1):
        loader = DataLoader(size=5, seed=1)
        again, _ = read(loader, batch_size=5, state=state, start_step=step)
        assert again == whole[step:]


def test_sets_are_told_the_epoch():
    told: list[int] = []
    loader = DataLoader()
    loader.dataset = type("Rows", (list,), {"set_epoch": lambda _, x: told.append(x)})(
        range(10)
    )
    cursor = Cursor("x", lambda: loader, repeat=True)
    assert cursor.batched
    for _ in range(9):
        next(cursor)
    assert told == [0, 1, 2]


def test_what_gives_processes_other_examples_is_refused(monkeypatch):
    with pytest.raises(UserError, match="has a DistributedSampler"):
        as_stream(DataLoader(num_replicas=2), repeat=True)
    assert stream(DataLoader(num_replicas=1)).loses == ""
    shuffled: Any = DataLoader()
    shuffled.sampler = RandomSampler()
    assert stream(shuffled).loses.startswith("in another order, as it shuffles")
    monkeypatch.setattr("jshard.data.iterables.jax.process_count", lambda: 2)
    with pytest.raises(UserError, match="shuffles without a generator, so"):
        as_stream(shuffled, repeat=True)
    shuffled.generator = Generator(0)
    assert stream(shuffled).loses == ""
    shuffled.generator = None
    shuffled.sampler.generator = Generator(0)
    found = stream(shuffled)
    assert (found.loses, found.divides, found.repeat) == ("", False, True)
    assert found.kind == "a DataLoader of PyTorch"


def test_a_loaders_fingerprint_is_its_rows_and_settings():
    assert fingerprint.fingerprint(DataLoader()) == {
        "the number of rows": "10",
        "batch_size of the loader": "3",
        "num_workers of the loader": "0",
    }
    loader = DataLoader()
    loader.dataset = iter(())  # type: ignore
    assert fingerprint.fingerprint(loader)["the number of rows"] == "any"
    assert fingerprint.fingerprint(lambda: 1) == {}
