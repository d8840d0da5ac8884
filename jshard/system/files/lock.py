"""A lock that lets one process at a time write to a folder."""

import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import IO

from jshard.system.errors import UserError, warn

_FILE = ".lock"
_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _leave_locks_to_the_run() -> None:
    """Runs in what a run forks, a data loader's worker, which may outlive it."""
    for lock in _held:
        lock.close()


os.register_at_fork(after_in_child=_leave_locks_to_the_run)


def lock_folder(folder: Path) -> IO[str]:
    """Locks a run's folder for this process, by its file `.lock`.

    Returns:
      The open file. Closing it unlocks the folder; the kernel does so when the process
      ends.

    Raises:
      UserError: Another process has locked the folder, or the file is a link, whose
        target would be overwritten.
    """
    try:
        number = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{folder / _FILE} is a link: give another folder") from error
    lock = os.fdopen(number, "r+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            raise _locked(folder, lock) from None
    except OSError as error:  # some network file systems have no locks
        warn(
            f"{folder} cannot be locked ({error.strerror}): make sure that only one "
            "process trains there"
        )
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    _held.add(lock)
    return lock


def check_unlocked(folder: Path) -> None:
    """Raises a UserError if another process has locked a folder, which may not exist.

    What is read there meanwhile would be incomplete, like a checkpoint that is being
    replaced.
    """
    try:
        with (folder / _FILE).open("r", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _locked(folder, lock) from None
    except OSError:  # nothing to lock yet, or no locks: `lock_folder` tells
        return


def _locked(folder: Path, lock: IO[str]) -> UserError:
    lock.seek(0)
    process = lock.read().strip()
    return UserError(f"another process ({process}) is training in --workdir={folder}")
