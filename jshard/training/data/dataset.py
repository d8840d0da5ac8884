"""What `make_data` may return: a `grain.MapDataset`, or what can be made one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from jshard.cli.user_code import describe_user_error
from jshard.errors import UserError
from jshard.training.config.config import Config

_NO_ITEMS = (Mapping, set, frozenset, str, bytes, tuple)  # they have a length, too


def make_training_data(
    make_data: Callable[[Config, str], Any], config: Config
) -> grain.MapDataset:
    """Makes the data that a run trains on.

    Args:
      make_data: The recipe's.
      config: The run's config.

    Raises:
      UserError: There is none, or it is no dataset.
    """
    data = as_dataset(make_data(config, "train"), config.seed, repeat=True)
    if data is None:
        raise UserError("make_data returned None for split 'train': return a dataset")
    return data


def make_validation_data(
    make_data: Callable[[Config, str], Any], config: Config
) -> grain.MapDataset | None:
    """The same of the data that a run is evaluated on; None where there is none."""
    if not config.eval_every:
        return None
    return as_dataset(make_data(config, "validation"), config.seed, repeat=False)


def as_dataset(data: Any, seed: int, *, repeat: bool) -> grain.MapDataset | None:
    """Makes a dataset of what has a length and numbered items.

    A list, a Hugging Face `datasets.Dataset`, an array, or a class with `__len__` and
    `__getitem__`; the lists and numbers in its items become arrays. A
    `grain.MapDataset` stays as it is.

    Args:
      data: What `make_data` returned.
      seed: Of the order.
      repeat: Whether to train on it: without an end, each epoch in an order of its own.

    Returns:
      The dataset; None where there is none.

    Raises:
      UserError: It has no length or no numbered items, or they are no numbers.
    """
    if data is None or isinstance(data, grain.MapDataset):
        return data
    numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not numbered or isinstance(data, _NO_ITEMS):
        raise UserError(
            f"make_data returned a {type(data).__name__}: return a grain.MapDataset, a "
            "list of examples, or what else has a length and items by their number, "
            "as that is how the batch of a step is found"
        )
    if not len(data):
        raise UserError(f"make_data returned a {type(data).__name__} without examples")
    try:
        _arrays(data[0])
    except Exception as error:
        if isinstance(error, UserError) or describe_user_error(error):
            raise
        raise UserError(
            f"make_data returned a {type(data).__name__}, whose item 0 cannot be read: "
            f"{error!r}; return a list of examples, or a grain.MapDataset"
        ) from error
    examples = grain.MapDataset.range(len(data)).map(lambda i: _arrays(data[int(i)]))
    return examples.seed(seed % 2**32).shuffle().repeat() if repeat else examples


def _arrays(value: Any, path: str = "") -> Any:
    """An example as a tree of arrays: a list is one array, a dict or tuple a tree."""
    if isinstance(value, Mapping):
        return {key: _arrays(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_arrays(item, f"{path}[{i}]") for i, item in enumerate(value))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UserError(
            f"make_data: example{path} is ragged, no array: {error}"
        ) from error
    _check_numbers(array, path)
    return array


def _check_numbers(array: np.ndarray, path: str) -> None:
    if array.dtype.kind in "OSUmM":  # objects, texts, dates
        found = "text" if array.dtype.kind in "SU" else f"of type {array.dtype}"
        raise UserError(
            f"make_data: example{path} is {found}: examples hold numbers alone; turn "
            "texts into tokens, and leave out what is not trained on"
        )


def stack(examples: Sequence[Any]) -> Any:
    """Stacks examples to a batch.

    Raises:
      UserError: They differ in structure or shapes, or are no numbers.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(examples[0])
    columns = [[np.asarray(leaf)] for _, leaf in paths]
    for example in examples[1:]:
        leaves, other = jax.tree.flatten(example)
        if other != structure:
            raise UserError(
                f"make_data: examples differ in structure: {structure} and {other}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(np.asarray(leaf))
    arrays = []
    for (path, _), column in zip(paths, columns, strict=True):
        name = jax.tree_util.keystr(path)
        shapes = sorted({x.shape for x in column})
        if len(shapes) > 1:
            listed = ", ".join(map(str, shapes[:3])) + ", ..." * (len(shapes) > 3)
            raise UserError(
                f"make_data: example{name} has several shapes in one batch: {listed}; "
                "pad or cut examples to one"
            )
        arrays.append(np.stack(column))
        _check_numbers(arrays[-1], name)
    return jax.tree.unflatten(structure, arrays)
