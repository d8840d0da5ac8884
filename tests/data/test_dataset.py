"""What `make_data` may return works like a grain MapDataset, or is one line."""

import collections
import itertools
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
import pytest
from ml_collections import ConfigDict

from jshard.data.batches import batches, eval_batches
from jshard.data.dataset import as_dataset, first_example
from jshard.data.iterables import Once, Stream
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.system.errors import UserError

ROWS = [{"tokens": [i, i + 1], "weight": 0.5} for i in range(5)]


class Rows:
    """As Hugging Face's `datasets.Dataset`: columns, and rows by Python integers."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, key):
        if type(key) is not int:
            raise TypeError(f"wrong key type: {type(key)}")
        return ROWS[key]


def read(data, steps=4, **options):
    dataset = as_dataset(data, 3, repeat=True)
    assert dataset is not None
    options = {"start_step": 0, "num_steps": steps, "batch_size": 5} | options
    return list(batches(dataset, **options))


@pytest.mark.parametrize(
    "data",
    [ROWS, Rows(), collections.deque(ROWS), grain.MapDataset.source(ROWS)[:]],
    ids=["list", "class", "deque", "dataset"],
)
def test_what_has_a_length_and_items_is_a_dataset(data):
    dataset = as_dataset(data, 0, repeat=False)
    assert dataset is not None
    if not isinstance(data, grain.MapDataset):
        ((batch, examples),) = eval_batches(dataset, batch_size=5)
        assert examples is None
        np.testing.assert_array_equal(batch["tokens"][:, 0], range(5))
        np.testing.assert_array_equal(batch["weight"], [0.5] * 5)


def test_training_goes_over_it_without_an_end_each_epoch_in_its_own_order():
    epochs = [list(batch["tokens"][:, 0]) for batch in read(Rows())]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    np.testing.assert_equal(read(Rows(), start_step=2), read(Rows())[2:])
    parts = [read(ROWS, batch_size=4, process_index=i, process_count=2) for i in (0, 1)]
    whole = read(ROWS, batch_size=4)
    for first, second, both in zip(*parts, whole, strict=True):
        rows = np.concatenate([first["tokens"], second["tokens"]])
        np.testing.assert_array_equal(rows, both["tokens"])


def test_rows_of_an_array_and_tuples_are_examples():
    (batch,) = read(np.arange(10).reshape(5, 2), steps=1)
    assert batch.shape == (5, 2)
    (batch,) = read([(np.ones(3), i) for i in range(5)], steps=1)
    assert batch[0].shape == (5, 3)
    assert sorted(batch[1]) == list(range(5))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": ROWS}, "returned a dict"),
        (({"x": 1}, {"x": 2}), "returned a tuple"),
        ("text", "returned a str"),
        (7, "returned a int"),
        ({"x": np.ones(3), "y": np.ones(4)}, "got ['x'] (3,), ['y'] (4,)"),
        ([], "returned a list without examples"),
        ([{"text": "hello"}], "example['text'] is text"),
        ([{"x": {"y": None}}], "example['x']['y'] is of type object"),
        ([{"x": [[1], [2, 3]]}], "example['x'] is ragged"),
        (collections.UserList(), "returned a UserList without examples"),
    ],
)
def test_what_cannot_work_is_one_line(data, said):
    with pytest.raises(UserError) as caught:
        as_dataset(data, 0, repeat=True)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grains", [True, False])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"x": [1]}, {"x": [1, 2]}], r"example\['x'\] has several shapes.*\(1,\), \("),
        ([{"x": 1}, {"y": 1}], "examples differ in structure"),
        ([{"x": 1}, {"x": "a"}], r"example\['x'\] is text"),
    ],
)
def test_examples_that_differ_are_one_line(rows, said, grains):
    rows = [{k: np.asarray(v) for k, v in row.items()} for row in rows]
    data = grain.MapDataset.source(rows).repeat() if grains else rows
    with pytest.raises(UserError, match=said):
        read(data, batch_size=2)


def test_an_error_in_the_users_items_is_theirs():
    class Broken(Rows):
        def __getitem__(self, key):
            raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        as_dataset(Broken(), 0, repeat=True)


def test_no_training_data_is_one_line_and_no_validation_data_is_none():
    config = complete(ConfigDict({"steps": 1, "batch_size": 1}), "r.py")
    recipe: Any = SimpleNamespace(make_data=lambda *_: None)
    with pytest.raises(UserError, match="make_data returned None for split 'train'"):
        configure(recipe, config).training_data()
    unread: Any = SimpleNamespace(make_data=lambda *_: 1 / 0)
    assert configure(unread, config).validation_data() is None


# Iterables.


class Iterable:
    def __iter__(self):
        return iter(ROWS)


ITERABLES = [
    Iterable(),
    lambda: iter(ROWS),
    lambda: ROWS,
    grain.MapDataset.source(ROWS).to_iter_dataset(),
]


@pytest.mark.parametrize("data", ITERABLES, ids=["class", "function", "list", "grain"])
def test_an_iterable_is_read_in_its_order_and_skipped_forward(data):
    def first(batch):
        return batch["tokens"][:, 0].tolist()

    got = [first(batch) for batch in read(data, batch_size=4)]
    assert [*itertools.chain(*got)] == [*range(5)] * 3 + [0]
    later = read(data, batch_size=4, start_step=2)
    assert [first(batch) for batch in later] == got[2:]
    parts = [read(data, batch_size=4, process_index=i, process_count=2) for i in (0, 1)]
    both = [first(a) + first(b) for a, b in zip(*parts, strict=True)]
    assert both == got
    dataset = as_dataset(data, 0, repeat=False)
    assert isinstance(dataset, Stream)
    assert first_example(dataset)["tokens"].tolist() == [0, 1]
    found = list(eval_batches(dataset, batch_size=4, devices=2, max_batches=2))
    assert [examples for _, examples in found] == [None, 1]
    got = [rows["tokens"][:examples, 0] for rows, examples in found]
    assert np.concatenate(got).tolist() == [*range(5)]


def test_an_iterator_is_read_once_from_where_a_run_starts():
    once = Once(iter(ROWS))
    dataset = as_dataset(once, 0, repeat=True)
    assert isinstance(dataset, Stream)
    assert first_example(dataset)["tokens"].tolist() == [0, 1]
    found = batches(dataset, batch_size=2, start_step=0, num_steps=3)
    assert next(found)["tokens"][:, 0].tolist() == [0, 1]
    assert next(found)["tokens"][:, 0].tolist() == [2, 3]
    with pytest.raises(UserError, match="the training data ends in step 3 of 3"):
        next(found)
    with pytest.raises(UserError, match="a list_iterator can be read once, and it has"):
        batches(dataset, batch_size=2, start_step=0, num_steps=1)
    with pytest.raises(UserError, match="evaluations read it each time"):
        as_dataset(iter(ROWS), 0, repeat=False)


def test_rows_of_columns_are_examples():
    columns = {"x": np.arange(5), "y": (np.ones((5, 2)), np.zeros(5))}
    dataset: Any = as_dataset(columns, 0, repeat=False)
    assert isinstance(dataset, grain.MapDataset)
    third: Any = dataset[3]
    assert third["x"] == 3
    ((batch, _),) = eval_batches(dataset, batch_size=5)
    np.testing.assert_equal(batch, columns)
