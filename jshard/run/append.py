"""Files that only grow; what a full disk refuses waits in memory."""

import os
from pathlib import Path

from jshard.cli.paths import not_by_a_link


class AppendedFile:
    """A file to append to, whose methods do not raise if the disk is full.

    They return why some of the data is not written yet, or "" if all of it is.
    """

    def __init__(self, path: Path):
        self._file = open(  # noqa: SIM115
            path, "a+b", buffering=0, opener=not_by_a_link
        )
        self._waiting = b""

    def write(self, data: bytes) -> str:
        """Appends waiting data and `data`, as much as the disk takes."""
        self._waiting += data
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read(self) -> bytes:
        """Returns the file and the waiting data, even if the file was deleted."""
        self._file.seek(0)  # appends go to the end anyway
        return self._file.readall() + self._waiting

    def sync(self) -> str:
        """Waits until the file is on the disk."""
        problem = self.write(b"")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        return problem

    def close(self) -> str:
        """Closes the file; data that is still waiting is lost."""
        problem = self.write(b"")
        self._file.close()
        return problem
