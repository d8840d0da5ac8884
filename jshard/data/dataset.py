"""What `make_data` may return, as a `grain.MapDataset` or a `Stream`."""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grain
import jax

from jshard.data.examples import count_rows, to_arrays
from jshard.data.iterables import Once, Stream, as_stream, has_items
from jshard.data.places import Cursor
from jshard.data.stream_reader import PartReader
from jshard.system.cli.user_code import describe_user_error
from jshard.system.errors import UserError

Dataset: TypeAlias = grain.MapDataset | Stream
Sets: TypeAlias = Dataset | Mapping[str, Dataset]  # of validation, one or by name
_ENDLESS = 2**53  # above the examples of any dataset, below those of endless ones


def as_sets(data: Any, seed: int, training_data: Callable[[], Dataset]) -> Sets | None:
    """Makes a dataset of validation data, or of a dict one for each of its names.

    A dict of datasets is several sets; one of arrays is one, whose rows are the
    examples. So is one of dicts of arrays if training examples have any of its keys,
    as those of preferences have "chosen".

    Raises:
      UserError: As `as_dataset` does, or a name cannot be that of a metric.
    """
    if not _has_sets(data, training_data):
        return as_dataset(data, seed, repeat=False)
    found: dict[str, Dataset] = {}
    for name, one in data.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(
                f"make_data returned a validation set called {name!r}: name sets by "
                "letters, digits and _, for metrics such as eval_NAME_loss"
            )
        if (dataset := as_dataset(one, seed, repeat=False)) is None:
            raise UserError(f"make_data returned None for validation set {name!r}")
        found[name] = dataset
    return found


def _has_sets(data: Any, training_data: Callable[[], Dataset]) -> bool:
    """Returns whether validation data are a dict of several sets."""
    if not isinstance(data, Mapping) or not data:
        return False
    values = data.values()
    if any(hasattr(one, "ndim") for one in values):  # an array
        return False
    if not any(map(_may_be_column, values)):
        return True
    example = first_example(training_data())
    return not (isinstance(example, Mapping) and example.keys() & data.keys())


def _may_be_column(value: Any) -> bool:
    """Returns whether a dict's value can be a part of examples as well as a set."""
    if isinstance(value, list):
        return bool(value) and not isinstance(value[0], Mapping | tuple)
    return isinstance(value, Mapping | tuple)


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
    elif isinstance(data, Mapping):
        raise UserError(
            f"make_data returned a {kind} of {', '.join(map(repr, data))}, which are "
            "no arrays: give a dict of arrays; several datasets by name can only be "
            "validation or test data"
        )
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


def rows_of_epoch(data: Dataset) -> int | None:
    """Returns how many examples training data have before they repeat.

    None where nothing says so: of a stream, and of a mixture of endless sources.
    """
    while not isinstance(data, Stream):
        if len(data) < _ENDLESS:
            return len(data)
        # Of what repeats without an end, and what has one example for each of those.
        if len(data) != sys.maxsize or len(data.parents) != 1:
            return None
        (data,) = data.parents
    return None


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
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple):
        return bool(data) and all(map(_is_columns, data))
    rows = data if isinstance(data, list) and data else [data]
    return all(getattr(x, "ndim", 0) > 0 for x in rows)
