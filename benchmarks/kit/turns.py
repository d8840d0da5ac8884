"""What the workers of stage peers share: their data, and how they are told to train.

A worker prints JSON lines and reads lines: it says that it is ready, then takes K steps
for each ``run K``, and at ``end`` says how much memory it took. Only NumPy is imported:
one of the workers has no JAX.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_UP = 3  # steps


def open_answers() -> Callable[..., None]:
    """What prints an answer; all else that is printed goes to the standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=stream, flush=True)

    return answer


def take_turns(
    answer: Callable[..., None],
    run: Callable[[int], tuple[list[float], list[float]]],
    peak_bytes: Callable[[], int | None],
) -> None:
    """Does what the lines of the standard input say.

    Args:
      answer: as ``open_answers`` gives it.
      run: takes so many steps; gives the seconds and the loss of each.
      peak_bytes: the most memory that was in use, where that is known.
    """
    for line in sys.stdin:
        if line.strip() == "end":
            break
        seconds, losses = run(int(line.removeprefix("run ")))
        answer(seconds=seconds, losses=losses)
    answer(peak_bytes=peak_bytes())


def random_batch(
    vocab_size: int, batch_size: int, length: int
) -> dict[str, np.ndarray]:
    """Random tokens, which all count; the same for all systems."""
    size = (batch_size, length + 1)
    tokens = np.random.default_rng(0).integers(0, vocab_size, size, dtype=np.int32)
    weights = np.ones((batch_size, length), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
