"""A folder that one process at a time writes to."""

import fcntl
import os
import warnings
from pathlib import Path
from typing import IO

from jshard.errors import UserError


def lock_folder(folder: Path) -> IO[str]:
    """Takes a run's folder for this process, by its file `.lock`.

    Args:
      folder: A folder that can be written.

    Returns:
      The lock: an open file. Closing it gives the folder back, and the kernel does
      so when the process ends, however it ends.

    Raises:
      UserError: Another process has the folder.
    """
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            process = lock.read().strip()
        raise UserError(
            f"another process ({process}) is training in --workdir={folder}"
        ) from None
    except OSError as error:  # some network file systems have no locks
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): see to it that only one "
            "process trains there",
            stacklevel=2,
        )
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
