"""Python's garbage collector: no pause of one process, for which the others wait.

By itself it runs when a process has made enough objects, which is at another step in
each of them, and looks at all that imports, tracing and data have made.
"""

import gc
import os
import time
import weakref
from contextlib import AbstractContextManager
from typing import Any

from jshard.training.run.account import Account

_running: "weakref.WeakSet[Collection]" = weakref.WeakSet()


def _collect_in_child() -> None:
    """Runs in what a run forks, like a data loader's worker, which has no steps."""
    for one in _running:
        one.restore()


os.register_at_fork(after_in_child=_collect_in_child)


class Collection(AbstractContextManager):
    """Runs the collector after every so many steps, and not in between.

    A context manager. After the first step what there is by then is frozen, which no
    collection looks at, unless the program has frozen objects itself. On exit the
    collector is again as it was found.

    Args:
      every: Steps between two collections; 0 leaves the collector alone.
      account: Is told how long each of them takes, whoever began it.
    """

    def __init__(self, every: int, account: Account):
        self._every, self._account = every, account
        self._automatic = self._freezes = False  # what to restore
        self._since = self._seconds = 0.0

    def __enter__(self) -> "Collection":
        gc.callbacks.append(self._time)
        return self

    def after_step(self, step: int) -> None:
        """Collects, if it is time; all processes call it after the same steps."""
        if not self._every:
            return
        if self not in _running:
            self._automatic = gc.isenabled()
            self._freezes = not gc.get_freeze_count()
            _running.add(self)
            gc.disable()
            gc.collect()  # otherwise garbage would be frozen
            if self._freezes:
                gc.freeze()
        elif step % self._every == 0:
            gc.collect()

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

    def restore(self) -> None:
        """Leaves the collector as it was before the first step."""
        if self._freezes:
            gc.unfreeze()
        if self._automatic:
            gc.enable()
        self._automatic = self._freezes = False

    def __exit__(self, *exception: object) -> None:
        gc.callbacks.remove(self._time)
        self.restore()
        _running.discard(self)
