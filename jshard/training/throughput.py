"""How fast a run trains: tokens or examples per second, and MFU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from jshard.data.examples import count_items, count_rows
from jshard.plan.fit.hardware import peak_flops
from jshard.sharding.layout.batch import rows_of_process


class Throughput:
    """Measures the speed of steps in wall time."""

    def __init__(
        self,
        batch: Any,
        mesh: Mesh,
        flops_per_token: float | None = None,
        *,
        done: int = 0,
        examples: int = 0,
        rows: int | None = None,
    ):
        """Starts the clock.

        Args:
          batch: This process's part of any batch; all batches have the same size.
          mesh: The devices that share the work.
          flops_per_token: Model FLOPs of one token, forward and backward. Without it,
            or on a device of unknown peak, MFU is left out.
          done: Steps that were made earlier.
          examples: How many examples these have read, in batches of any size.
          rows: How many examples an epoch has, if that is known.
        """
        self._unit, items = count_items(batch)
        self._items = items * rows_of_process(mesh)[1]
        items_of_row = items // count_rows(batch)
        self._done, self._seen = done, examples * items_of_row
        self._epoch = rows and rows * items_of_row
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._flops = flops_per_token if self._unit == "tokens" else None
        self._peak = peak * mesh.size if peak else None
        self._step_time = 0.0  # of the steps that were measured last
        self.restart()

    def restart(self) -> None:
        """Restarts the clock, so that time spent outside of steps is not counted."""
        self._began = self._since = time.perf_counter()
        self._steps = 0  # complete since then

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock within it."""
        began = time.perf_counter()
        yield
        pause = time.perf_counter() - began
        self._began += pause
        self._since += pause

    def seen(self, step: int) -> dict[str, float]:
        """Returns how much the first steps of a run have read: in items, and epochs."""
        seen = self._seen + (step - self._done) * self._items
        epochs = {"epoch": seen / self._epoch} if self._epoch else {}
        return {f"{self._unit}_seen": seen, **epochs}

    def measure(self, steps: int, *, drained: bool = False) -> dict[str, float]:
        """Returns the metrics of steps that are complete now.

        Args:
          steps: How many have become complete since the last call. With 0, which the
            first call after a restart must not give, the metrics are those of before.
          drained: Whether no step is under way any more. What is left then took less
            time than a step does, as its data came before, so that the mean of all
            steps since the restart is measured.
        """
        now = time.perf_counter()
        self._steps += steps
        if drained:
            self._step_time = (now - self._began) / self._steps
        elif steps:
            self._step_time = (now - self._since) / steps
            self._since = now
        return self.speed(self._step_time)

    def speed(self, step_time: float) -> dict[str, float]:
        """Returns the metrics of steps that take so many seconds each."""
        per_second = self._items / step_time
        values = {"step_time": step_time, f"{self._unit}_per_second": per_second}
        if self._flops and self._peak:
            values["mfu"] = per_second * self._flops / self._peak
        return values
