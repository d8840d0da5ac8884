"""Data of PyTorch and of Hugging Face's `datasets`, in a run."""

import jax
import numpy as np
import pytest

from jshard.data.batches import batches, eval_batches
from jshard.data.dataset import as_dataset
from jshard.data.iterables import Stream
from jshard.data.stream_reader import describe
from jshard.system.errors import UserError

torch = pytest.importorskip("torch")
td = torch.utils.data

ROWS = np.arange(22, dtype=np.float32).reshape(11, 2)


class Rows(td.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return {"x": torch.tensor(ROWS[index]), "y": index}


class Flow(td.IterableDataset):
    def __iter__(self):
        return iter({"x": torch.tensor(row)} for row in ROWS)


def read(data, steps=3, start=0, size=4, **process):
    dataset = as_dataset(data, 0, repeat=True)
    found = batches(
        dataset, batch_size=size, start_step=start, num_steps=steps, **process
    )
    return [batch["x"] for batch in found]


def ordered(count):
    return np.resize(ROWS, (count, 2))


def test_a_map_style_dataset_is_shuffled_each_epoch_and_found_by_step():
    got = np.concatenate(read(Rows(), 11, size=2))
    assert sorted(got[:11, 0]) == sorted(ROWS[:, 0])
    np.testing.assert_array_equal(read(Rows(), 5, start=3), read(Rows(), 5)[3:])


@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_a_loader_is_read_in_its_order_whatever_its_batches(size):
    loader = td.DataLoader(Rows(), batch_size=size)
    got = read(loader, 6)
    np.testing.assert_array_equal(np.concatenate(got), ordered(24))
    np.testing.assert_array_equal(read(loader, 6, start=4), got[4:])
    parts = [read(loader, 6, process_index=i, process_count=2) for i in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), got)


def test_a_loader_says_what_it_loses():
    unseeded = as_dataset(td.DataLoader(Rows(), shuffle=True), 0, repeat=True)
    assert isinstance(unseeded, Stream)
    assert "shuffles without a generator" in describe("train", unseeded, None, 1)
    seeded = torch.Generator().manual_seed(0)
    loader = td.DataLoader(Rows(), shuffle=True, generator=seeded)
    stream = as_dataset(loader, 0, repeat=True)
    assert isinstance(stream, Stream)
    note = describe("train", stream, None, 1)
    assert "train is a DataLoader of PyTorch: without a state" in note
    assert "without a generator" not in note


def test_a_sampler_that_gives_each_process_other_examples_is_refused():
    sampler = td.DistributedSampler(Rows(), num_replicas=2, rank=0)
    with pytest.raises(UserError, match="leave it out"):
        as_dataset(td.DataLoader(Rows(), sampler=sampler), 0, repeat=True)


def test_tuples_that_a_loader_collates_are_tuples():
    data = td.TensorDataset(torch.tensor(ROWS), torch.arange(11))
    dataset = as_dataset(td.DataLoader(data, batch_size=5), 0, repeat=True)
    (batch,) = batches(dataset, batch_size=4, start_step=0, num_steps=1)
    assert [x.shape for x in batch] == [(4, 2), (4,)]


def test_an_iterable_dataset_and_workers():
    np.testing.assert_array_equal(np.concatenate(read(Flow(), 6)), ordered(24))


def test_a_streams_evaluation_counts_each_example_once():
    loader = td.DataLoader(Rows(), batch_size=3)
    dataset = as_dataset(loader, 0, repeat=False)
    found = list(eval_batches(dataset, batch_size=4, devices=2))
    total = sum(rows["x"][:examples].sum() for rows, examples in found)
    assert total == ROWS.sum()
    assert [len(rows["x"]) for rows, _ in found] == [4, 4, 2, 2]
    assert [examples for _, examples in found] == [None, None, None, 1]


def test_bfloat16_tensors_are_one_line():
    with pytest.raises(UserError, match=r"example\['x'\] cannot be an array of NumPy"):
        as_dataset([{"x": torch.ones(2, dtype=torch.bfloat16)}], 0, repeat=True)


def test_datasets_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    columns = {"x": ROWS.tolist(), "y": list(range(11))}
    data = datasets.Dataset.from_dict(columns)
    for made in (data, data.with_format("numpy"), data.with_format("torch")):
        got = np.concatenate(read(made, 11, size=2))
        assert sorted(got[:11, 0]) == sorted(ROWS[:, 0])
        example = as_dataset(made, 0, repeat=False)[0]  # type: ignore[index]
        assert jax.tree.map(np.shape, example) == {"x": (2,), "y": ()}
    stream = data.to_iterable_dataset()
    np.testing.assert_array_equal(np.concatenate(read(stream, 6)), ordered(24))
    with pytest.raises(UserError, match=r"example\['text'\] is text"):
        as_dataset(data.add_column("text", ["a"] * 11), 0, repeat=True)
