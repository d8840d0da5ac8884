"""The pauses in which Python collects garbage, for which a step may have waited."""

import gc
import time
from contextlib import AbstractContextManager
from typing import Any, Self

from jshard.training.run.account import Account


class Pauses(AbstractContextManager):
    """Measures Python's collections of garbage, and leaves the collector alone.

    A context manager. `account` is told how long each of them took.
    """

    def __init__(self, account: Account):
        self._account = account
        self._since = self._seconds = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._time)
        return self

    def take(self) -> float:
        """Returns the seconds of all collections since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _time(self, phase: str, _: Any) -> None:
        now = time.perf_counter()
        if phase == "stop":
            self._seconds += now - self._since
            self._account.apart("collecting", now - self._since)
        self._since = now

    def __exit__(self, *exception: object) -> None:
        gc.callbacks.remove(self._time)
