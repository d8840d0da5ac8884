"""`steps=3epochs`: as many updates as read the training data that often."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from jshard.data.dataset import rows_of_epoch
from jshard.recipe.config.run_config import check, epochs_in
from jshard.recipe.config.settings import MOST_STEPS
from jshard.recipe.configured import configure
from jshard.recipe.definition import Recipe
from jshard.system.errors import UserError

_STEPS = "steps"


def take_epochs(
    given: Mapping[str, Any], recipe: Recipe
) -> tuple[dict[str, Any], Fraction | None]:
    """Takes `steps=3epochs` out of keys or words, and returns both.

    Without steps among them, the recipe's count. The steps among the keys are the most
    that there can be, until `set_epochs` knows the data; None stands for no epochs.
    """
    own = {} if _STEPS in given else recipe.get_config()
    steps = {**own, **given}.get(_STEPS) if isinstance(own, Mapping | ConfigDict) else 0
    if (epochs := epochs_in(steps)) is None:
        return dict(given), None
    return {**given, _STEPS: MOST_STEPS}, epochs


def set_epochs(recipe: Recipe, config: ConfigDict, epochs: Fraction | None) -> None:
    """Sets a config's steps to the fewest that read all rows so often.

    Raises:
      UserError: Nothing says how many rows an epoch has, or there are no steps.
    """
    if epochs is None:
        return
    data = configure(recipe, config).training_data()
    if (rows := rows_of_epoch(data)) is None:
        raise UserError(
            f"--config.steps={float(epochs):g}epochs: the training data do not say how "
            "many rows they have (a stream, a mixture): give a number of steps"
        )
    config.steps = steps_of(rows * epochs, config.batch_size)
    check(config)


def steps_of(rows: Fraction | int, batch_size: int) -> int:
    """Returns how many steps read as many rows at least."""
    return math.ceil(Fraction(rows) / batch_size)


def describe_epoch(rows: int, batch_size: int) -> str:
    """Returns "1,234 rows: 39 steps per epoch"."""
    steps = steps_of(rows, batch_size)
    return f"{rows:,} rows: {steps:,} step{'s' * (steps > 1)} per epoch"
