"""Work that a run hands to a thread, so that no step waits for it."""

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A thread that works on what it is given, in order and in batches.

    It works at once and then rests: what comes in meanwhile is the next batch. A thread
    that wakes for every short step would slow the steps down.

    Args:
      work: Called in the thread with the items of a batch.
      rest: Seconds between two batches; `drain` cuts them short.
      name: Of the thread.

    Attributes:
      error: What `work` raised first, which ends the work; None if nothing.
    """

    def __init__(self, work: Callable[[list[T]], object], rest: float, name: str):
        self.error: Exception | None = None
        self._work, self._rest = work, rest
        self._items: collections.deque[T | threading.Event] = collections.deque()
        self._given, self._hurry = threading.Event(), threading.Event()
        self._closed = False
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

    def close(self) -> None:
        """Waits for all items, and ends the thread."""
        self._closed = True
        self.drain()

    def _run(self) -> None:
        while not self._closed or self._items:
            self._given.wait()
            self._given.clear()
            batch = [self._items.popleft() for _ in range(len(self._items))]
            items = [x for x in batch if not isinstance(x, threading.Event)]
            if items and self.error is None:
                try:
                    self._work(items)
                except Exception as error:
                    self.error = error
            for done in batch:
                if isinstance(done, threading.Event):
                    done.set()
            self._hurry.wait(self._rest)
            self._hurry.clear()
