"""The processes of a save: each tells what it wrote, and hears if another has failed.

They talk through JAX's coordination service. Orbax by itself would wait 20 minutes for
a process that has failed.
"""

import concurrent.futures
import errno
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.storage.checkpoint.buckets.objects import BucketError
from jshard.system.compat.coordination import KeyValueStore

_PATIENCE = 1200.0  # seconds to wait for other processes, as Orbax does
_POLL = 0.5  # seconds


class Participants:
    """The processes of one save, as one of them sees them.

    Every process makes one for each save, when the save before has ended there.

    Args:
      saves: A name for the saves of one folder, the same on all processes.
      number: Which of them this is, from 0.

    Attributes:
      index: Rank of this process.
      count: The number of processes.
    """

    def __init__(self, saves: str, number: int):
        self.index, self.count = jax.process_index(), jax.process_count()
        if self.count > 1:
            self._store = KeyValueStore(f"{saves} {number}")
            if self.index == 0:  # all have come to the save after that one
                KeyValueStore(f"{saves} {number - 2}").clear()

    def wait_for(self, response: Any) -> None:
        """Waits until Orbax has written all arrays.

        Raises:
          OSError: It failed, here or on another process.
        """
        if self.count == 1:
            return response.result()
        written: concurrent.futures.Future[None] = concurrent.futures.Future()

        def wait() -> None:
            try:
                written.set_result(response.result())
            except BaseException as error:
                written.set_exception(error)

        # A daemon, because it may be left waiting when another process has failed.
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while not concurrent.futures.wait([written], timeout=_POLL).done:
            if failed := self._store.all_in("failed"):
                raise _failed_elsewhere(*failed.values())
        thread.join()
        written.result()

    def gather(self, mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what each process wrote, on process 0; elsewhere waits for the end.

        Raises:
          OSError: The save failed on another process.
        """
        if self.index:
            self._store.put(f"{self.index}", json.dumps(mine))
            if problem := self._store.get("end", _PATIENCE):
                raise _failed_elsewhere(problem)
            return []
        parts = [mine]
        for process in range(1, self.count):
            parts.append(json.loads(self._store.get(f"{process}", _PATIENCE)))
            if problem := parts[-1].get("error"):
                raise _failed_elsewhere(problem)
        return parts

    def end(self, problem: str = "") -> None:
        """Tells the others that the save has succeeded or, with a problem, failed."""
        if self.count == 1:
            return
        if problem:
            self._store.put(f"failed/{self.index}", problem)
        if self.index == 0:
            self._store.put("end", problem)
        elif problem:
            self._store.put(f"{self.index}", json.dumps({"error": problem}))


def _failed_elsewhere(problem: str, *_: str) -> OSError:
    return OSError(f"the save failed on another process: {problem}")


def on_first(action: Callable[[], None]) -> None:
    """Runs ``action`` on process 0; if it raises OSError, all processes raise one."""
    code, own = 0, None
    if jax.process_index() == 0:
        try:
            action()
        except OSError as error:
            code, own = error.errno or errno.EIO, error
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
    if code:
        raise own or OSError(code, f"{os.strerror(code)} (on process 0)")


def why(error: BaseException) -> str:
    """Returns the root cause of an error on one line."""
    while error.__cause__ is not None and not isinstance(error, BucketError):
        error = error.__cause__
    if isinstance(error, BucketError):
        return str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        if os.strerror(number) in str(error):  # inside TensorStore's long message
            return os.strerror(number)
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
