"""Tells of a process that is alone and stuck, before XLA aborts it with a C++ trace.

Devices that wait for each other use no processor. XLA:CPU warns of them after 20
seconds and aborts the process after 60 (xla/service/rendezvous.cc); neither says where
training was.
"""

import threading
import time
from collections.abc import Callable

import jax

PERIOD = 1.0  # seconds between looks
IDLE = 12.0  # seconds without a move and without work that are too many
BUSY = 0.1  # of one core: a process that uses more is at work

_AWAITED = {
    "data": "the recipe's data",
    "reading the first batch": "the recipe's data",
    "reading the first evaluation batch": "the recipe's data",
    "restoring": "the disk",
    "saving": "the disk",
    "finishing": "the disk",
}


class IdleWatch:
    """A thread that looks whether this process moves or works, within a `with`."""

    def __init__(self, tell: Callable[[str], None]):
        """Watches nothing yet.

        Args:
          tell: given one line for each place where the process is stuck.
        """
        self._tell = tell
        self._moves, self._phase, self._step = 0, "", 0
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="jshard-idle", daemon=True
        )

    def __enter__(self) -> "IdleWatch":
        """Starts to watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self._over.set()

    def at(self, phase: str, step: int) -> None:
        """Says where this process is."""
        self._phase, self._step = phase, step
        self._moves += 1

    def _run(self) -> None:
        told = moves = 0
        since = now = time.monotonic()
        work = time.process_time()
        while not self._over.wait(PERIOD):
            last, now = now, time.monotonic()
            before, work = work, time.process_time()
            at_work = work - before > BUSY * (now - last)
            stopped = now - last > 2 * PERIOD  # by a signal, or with the machine
            if at_work or stopped or self._moves != moves:
                since, moves = now, self._moves
            # Where there are GPUs the processor rests while they compute.
            elif now - since > IDLE and told != moves and _on_cpus():
                told = moves
                self._tell(self._line(now - since))

    def _line(self, seconds: float) -> str:
        awaited = _AWAITED.get(self._phase)
        why = (
            f"it waits for {awaited}" if awaited else "its devices wait for each other"
        )
        return (
            f"step {self._step} ({self._phase}) has neither moved nor computed for "
            f"{seconds:.0f} s: {why}. If that lasts, stop the run and start it again "
            "with the same --workdir: it goes on from its newest checkpoint"
        )


def _on_cpus() -> bool:
    return jax.default_backend() == "cpu"
