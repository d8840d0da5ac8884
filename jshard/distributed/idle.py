"""Tells of a process that is alone and stuck, before XLA aborts it with a C++ trace.

CPU devices that wait for each other use no processor. XLA:CPU warns of them after 20
seconds and aborts the process after 60 (xla/service/rendezvous.cc); neither says where
training was. With GPUs a processor may rest while they compute: there a process is
stuck that stays at a place for longer than it should.
"""

import threading
import time
from collections.abc import Callable

import jax

from jshard.distributed.patience import UNKNOWN

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
        self._patience = UNKNOWN
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

    def at(self, phase: str, step: int, patience: float = UNKNOWN) -> None:
        """Says where this process is, and how many seconds it may stay there."""
        self._phase, self._step, self._patience = phase, step, patience
        self._moves += 1

    def _run(self) -> None:
        told = moves = 0
        moved = since = now = time.monotonic()
        work = time.process_time()
        while not self._over.wait(PERIOD):
            last, now = now, time.monotonic()
            before, work = work, time.process_time()
            at_work = work - before > BUSY * (now - last)
            stopped = now - last > 2 * PERIOD  # by a signal, or with the machine
            if stopped or self._moves != moves:
                moved, moves = now, self._moves
            since = now if at_work else max(since, moved)
            if told == moves or now - moved <= IDLE:
                continue
            cpus = jax.default_backend() == "cpu"
            idle = now - (since if cpus else moved)
            if idle > (IDLE if cpus else self._patience):
                told = moves
                self._tell(self._line(idle, cpus))

    def _line(self, seconds: float, cpus: bool) -> str:
        awaited = _AWAITED.get(self._phase)
        devices = (
            "its devices wait for each other" if cpus else "much longer than before"
        )
        why = f"it waits for {awaited}" if awaited else devices
        been = "neither moved nor computed" if cpus else "not got on"
        return (
            f"step {self._step} ({self._phase}) has {been} for {seconds:.0f} s: {why}. "
            "If that lasts, stop the run and start it again with the same --workdir: "
            "it goes on from its newest checkpoint"
        )
