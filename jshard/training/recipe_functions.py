"""A recipe's data and functions, ready for the steps of a run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jshard.data.batches import TrainingBatches
from jshard.sharding.settings.state import TrainState
from jshard.training.precomputed import Precomputed
from jshard.training.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class RecipeFunctions:
    """What a recipe gives a run for its steps.

    Attributes:
      batches: This process's parts of all batches.
      evaluate: From a state to the metrics of an evaluation; None without.
      precompute: From a state to what the recipe computes once for each example; None
        without.
      sample: From a state to a text; None without.
      pictures: From a state to pictures for the report; None without.
      learning_rate: Of the n-th update, from 0; None if it is not known.
      throughput: Measures the speed of steps.
      references: Losses to compare the evaluation's with, by name.
      find_cause: Returns why the loss of a step is not finite, or "".
      note: How a stream of training data is read; empty for other data.
    """

    batches: TrainingBatches
    evaluate: Callable[[TrainState], dict[str, float]] | None
    precompute: Callable[[TrainState], Precomputed] | None
    sample: Callable[[TrainState], str] | None
    pictures: Callable[[TrainState], Any] | None
    learning_rate: Callable[[int], float] | None
    throughput: Throughput
    references: Mapping[str, float]
    find_cause: Callable[[int], str]
    note: str
