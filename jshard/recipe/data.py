"""A recipe's data, for training and for validation."""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jshard.data.dataset import Dataset, Sets, as_dataset, as_sets
from jshard.system.errors import UserError


def make_training_data(
    make_data: Callable[[ConfigDict, str], Any], config: ConfigDict
) -> Dataset:
    """Returns a recipe's training data; a UserError if it is missing or no dataset."""
    data = as_dataset(make_data(config, "train"), config.seed, repeat=True)
    if data is None:
        raise UserError("make_data returned None for split 'train': return a dataset")
    return data


def make_validation_data(
    make_data: Callable[[ConfigDict, str], Any], config: ConfigDict
) -> Sets | None:
    """Returns a recipe's validation data, or None without data or evaluations."""
    if not config.eval_every:
        return None
    data = make_data(config, "validation")
    return as_sets(data, config.seed, lambda: make_training_data(make_data, config))
