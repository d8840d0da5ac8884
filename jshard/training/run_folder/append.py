"""Files that only grow; what a full disk does not take waits in memory."""

import os
from pathlib import Path


class AppendedFile:
    """A file to append to, which never raises for a disk that is full for a while."""

    def __init__(self, path: Path):
        """Opens the file, and makes it when it is not there.

        Raises:
          OSError: It cannot be opened.
        """
        self._file = path.open("a+b", buffering=0)
        self._waiting = b""

    def write(self, data: bytes) -> str:
        """Appends what waits and `data`, as much as the disk takes.

        Returns:
          Why some of it waits now; empty when all is written.
        """
        self._waiting += data
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> bytes:
        """Returns all of the file, and what waits; also of one that was deleted."""
        self._file.seek(0)  # appends go to the end all the same
        return self._file.readall() + self._waiting

    def sync(self) -> str:
        """Waits for the disk; returns why some of the file is not on it, or ""."""
        problem = self.write(b"")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        return problem

    def close(self) -> str:
        """Closes the file; returns why some of it is lost, or ""."""
        problem = self.write(b"")
        self._file.close()
        return problem
