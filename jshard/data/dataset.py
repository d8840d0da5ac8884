"""What `make_data` may return, as a `grain.MapDataset` or a `Stream`."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grain
import jax

from jshard.cli.user_code import describe_user_error
from jshard.config.run_config import Config
from jshard.data.examples import count_rows, to_arrays
from jshard.data.iterables import Once, Stream, as_stream, has_items
from jshard.data.places import Cursor
from jshard.data.stream_reader import PartReader
from jshard.errors import UserError

Dataset: TypeAlias = grain.MapDataset | Stream


def make_training_data(
    make_data: Callable[[Config, str], Any], config: Config
) -> Dataset:
    """Returns a recipe's training data; a UserError if it is missing or no dataset."""
    data = as_dataset(make_data(config, "train"), config.seed, repeat=True)
    if data is None:
        raise UserError("make_data returned None for split 'train': return a dataset")
    return data


def make_validation_data(
    make_data: Callable[[Config, str], Any], config: Config
) -> Dataset | None:
    """Returns a recipe's validation data, or None without data or evaluations."""
    if not config.eval_every:
        return None
    return as_dataset(make_data(config, "validation"), config.seed, repeat=False)


def as_dataset(data: Any, seed: int, *, repeat: bool) -> Dataset | None:
    """Makes a dataset of the data that people have.

    What has a length and items by number is one: lists, arrays, PyTorch's and Hugging
    Face's map-style datasets; so is a dict or tuple of arrays, whose rows are the
    examples. Lists, tensors and numbers in items become arrays. Other iterables become
    a `Stream`. None and a `grain.MapDataset` are returned unchanged.

    With `repeat` the dataset repeats forever, in a new order each epoch that follows
    from the seed.

    Raises:
      UserError: `data` is none of these, or an item does not consist of numbers.
    """
    if data is None or isinstance(data, grain.MapDataset | Stream):
        return data
    kind = type(data).__name__
    if isinstance(data, Mapping | tuple) and _is_columns(data):
        arrays = to_arrays(data)
        count, read = count_rows(arrays), lambda i: jax.tree.map(lambda x: x[i], arrays)
    elif stream := as_stream(data, repeat=repeat):
        return stream
    elif has_items(data):
        count, read = len(data), lambda i: to_arrays(data[int(i)])
    else:
        raise UserError(
            f"make_data returned a {kind}: return a grain.MapDataset, a list of "
            "examples, a dict or tuple of arrays, or another object with items by "
            "number or an iterator"
        )
    if not count:
        raise UserError(f"make_data returned a {kind} without examples")
    try:
        read(0)
    except Exception as error:
        if isinstance(error, UserError) or describe_user_error(error):
            raise
        raise UserError(
            f"make_data returned a {kind}, whose item 0 cannot be read: {error!r}; "
            "return a list of examples, or a grain.MapDataset"
        ) from error
    examples = grain.MapDataset.range(count).map(read)
    return examples.seed(seed % 2**32).shuffle().repeat() if repeat else examples


def first_example(data: Dataset) -> Any:
    """Returns the first example of a dataset; a stream can still be read."""
    if not isinstance(data, Stream):
        return data[0]
    source = data.open_part(0, 1)
    if isinstance(source, Once):
        source = source.first()
    cursor = Cursor(data.kind, lambda: source, repeat=False)
    with contextlib.closing(PartReader(cursor, 1)) as reader:
        return jax.tree.map(lambda x: x[0], next(reader))


def _is_columns(data: Any) -> bool:
    """Returns whether a dict or tuple holds arrays of at least one dimension alone."""
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(getattr(x, "ndim", 0) > 0 for x in leaves)
