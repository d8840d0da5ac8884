"""What the workers of stage peers share: their data, and how they are told to train.

A worker prints JSON lines and reads lines: it says that it is ready, then takes K steps
for each ``run K``, and at ``end`` says how much memory these steps took. Only NumPy is
imported: one of the workers has no JAX.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 3  # steps
IMAGES = {"image_size": 8, "channels": 1, "classes": 10}  # of train/digits.py


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
    if measures := sys.platform == "linux" and peak_bytes() is None:  # on CPUs
        # What compiling took is no step's.
        Path("/proc/self/clear_refs").write_text("5")
    for line in sys.stdin:
        if line.strip() == "end":
            break
        seconds, losses = run(int(line.removeprefix("run ")))
        answer(seconds=seconds, losses=losses)
    answer(peak_bytes=peak_bytes(), host_bytes=_host_bytes() if measures else None)


def _host_bytes() -> int:
    """Returns the most memory of this process, without the files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    peak, files = (int(sizes[name].split()[0]) for name in ("VmHWM", "RssFile"))
    return (peak - files) * 1024


def random_batch(model: Mapping[str, Any], batch_size: int) -> dict[str, np.ndarray]:
    """Returns random examples, which all count; the same for all systems.

    Args:
      model: a recipe's ``config.model``, of train/digits.py or of a language model.
      batch_size: number of examples.
    """
    rng = np.random.default_rng(0)
    if "patch_size" in model:
        size, channels, classes = IMAGES.values()
        images = rng.random((batch_size, size, size, channels), np.float32)
        targets = np.eye(classes, dtype=np.float32)[
            rng.integers(classes, size=batch_size)
        ]
        weights = np.ones(batch_size, np.float32)
        return {"image": images, "targets": targets, "weights": weights}
    length = model["sequence_length"]
    tokens = rng.integers(
        0, model["vocab_size"], (batch_size, length + 1), dtype=np.int32
    )
    weights = np.ones((batch_size, length), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
