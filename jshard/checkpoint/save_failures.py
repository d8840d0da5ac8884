"""How the processes of a save learn that one of them has failed.

A process whose save fails removes the file ``.sound`` in the folder of the save. The
others check for it while they wait, because Orbax would wait 20 minutes for a process.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.checkpoint import step_folders
from jshard.checkpoint.buckets.objects import BucketError
from jshard.checkpoint.step_folders import SOUND

FAILED_ELSEWHERE = "the save failed on another process"
_PATIENCE = 1200  # seconds to wait for other processes, as Orbax does
_POLL = 0.02  # seconds


def wait_for_arrays(response: Any, folder: Path) -> None:
    """Waits until Orbax has written all arrays or a process has failed."""
    if jax.process_count() == 1:
        return response.result()
    written: Future[None] = Future()

    def wait() -> None:
        try:
            written.set_result(response.result())
        except BaseException as error:
            written.set_exception(error)

    # A daemon, because it may be left waiting when another process has failed.
    threading.Thread(target=wait, daemon=True).start()
    wait_until(written.done, folder)
    written.result()


def give_up(folder: Path) -> None:
    """Signals to other processes that a save has failed, and removes it."""
    with suppress(OSError):
        (folder / SOUND).unlink()
    if jax.process_index() == 0:
        step_folders.give_up(folder)


def wait_until(condition: Callable[[], bool], folder: Path) -> None:
    """Waits for other processes; raises OSError if the save fails on one of them."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        # Checked before the condition, because a successful save removes the file, too.
        sound = (folder / SOUND).exists()
        if condition():
            return
        if not sound:
            raise OSError(FAILED_ELSEWHERE)
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process did not finish within {_PATIENCE} s")
        time.sleep(_POLL)


def on_first(action: Callable[[], None]) -> None:
    """Runs ``action`` on process 0; if it raises OSError, all processes raise it."""
    code = 0
    if jax.process_index() == 0:
        try:
            action()
        except OSError as error:
            code = error.errno or errno.EIO
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
    if code:
        raise OSError(code, os.strerror(code))


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
