"""A recipe's data and functions, ready for the steps of a run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jshard.fsdp.state import TrainState
from jshard.training.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class RecipeFunctions:
    """What a recipe gives a run for its steps.

    Attributes:
      first_batch: This process's part of the first batch.
      batches: Its parts of all batches, the first included.
      evaluate: From a state to the metrics of an evaluation; None without.
      sample: From a state to a text; None without.
      pictures: From a state to pictures for the report; None without.
      learning_rate: Of the n-th update, from 0; None if it is not known.
      throughput: Measures the speed of steps.
      references: Losses to compare the evaluation's with, by name.
      find_cause: Returns why the loss of a step is not finite, or "".
      note: What data lose that can only be read from their start; empty for none.
    """

    first_batch: Any
    batches: Iterable[Any]
    evaluate: Callable[[TrainState], dict[str, float]] | None
    sample: Callable[[TrainState], str] | None
    pictures: Callable[[TrainState], Any] | None
    learning_rate: Callable[[int], float] | None
    throughput: Throughput
    references: Mapping[str, float]
    find_cause: Callable[[int], str]
    note: str
