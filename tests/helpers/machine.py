"""How fast the machine is, by which limits of time are scaled."""

import time

# CPU seconds in which the machine of docs/figures/tests.md sums ten million squares.
SUMMED = 0.85


def slower() -> float:
    """How many times as slow as the machine of docs/figures/tests.md this one is."""
    start = time.process_time()
    sum(x * x for x in range(10_000_000))
    return max(1.0, (time.process_time() - start) / SUMMED)
