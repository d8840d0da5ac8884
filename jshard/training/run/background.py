"""Work that a run hands to a thread, so that no step waits for it."""

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 60.0  # seconds that the end of a run waits for what may never answer


class Background(Generic[T]):
    """A thread that works on what it is given, in order and in batches.

    It works at once and then rests: what comes in meanwhile is the next batch. A thread
    that wakes for every short step would slow the steps down.

    Args:
      work: Called in the thread with the items of a batch.
      rest: Seconds between two batches; `drain` cuts them short.
      name: Of the thread.

    Attributes:
      error: What was raised first, which ends the work; None if nothing.
    """

    def __init__(self, work: Callable[[list[T]], object], rest: float, name: str):
        self.error: Exception | None = None
        self._work, self._rest = work, rest
        self._items: collections.deque[T | threading.Event] = collections.deque()
        self._given, self._hurry = threading.Event(), threading.Event()
        self._last: Callable[[], object] | None = None
        self._ended = threading.Event()
        # A daemon, as a server may never answer; `close` is what waits for it.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, item: T) -> None:
        """Hands over an item."""
        self._items.append(item)
        self._given.set()

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until all items so far are worked on; returns whether they are."""
        done = threading.Event()  # an item that the thread sets
        self._items.append(done)
        self._given.set()
        self._hurry.set()
        return done.wait(timeout)

    def end(self, last: Callable[[], object] = lambda: None) -> None:
        """Has the thread call `last` after all items, and end; does not wait for it."""
        if self._last is None:
            self._last = last
            self._items.append(self._ended)
            self._given.set()
            self._hurry.set()

    def close(self, timeout: float | None = PATIENCE) -> bool:
        """Ends the thread; returns whether it did within some seconds, None for any."""
        self.end()
        return self._ended.wait(timeout)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._given.wait()
            self._given.clear()
            batch = [self._items.popleft() for _ in range(len(self._items))]
            if items := [x for x in batch if not isinstance(x, threading.Event)]:
                self._try(lambda items=items: self._work(items))
            if self._last is not None and any(x is self._ended for x in batch):
                self._try(self._last)
            for done in batch:
                if isinstance(done, threading.Event):
                    done.set()
            if not self._ended.is_set():
                self._hurry.wait(self._rest)
                self._hurry.clear()

    def _try(self, act: Callable[[], object]) -> None:
        """Does something unless something failed before."""
        if self.error is None:
            try:
                act()
            except Exception as error:
                self.error = error
