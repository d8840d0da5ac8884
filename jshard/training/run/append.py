"""Files that only grow; what a full disk refuses waits in memory."""

import io
import os
import shutil
from pathlib import Path

from jshard.system.cli.paths import not_by_a_link
from jshard.system.files.atomic import replacing


class AppendedFile:
    """A file to append to, whose methods do not raise if the disk is full.

    They return why some of the data is not written yet, or "" if all of it is.

    Attributes:
      synced: How many of its bytes are on the disk for sure.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = _opened(path)
        self._size = os.fstat(self._file.fileno()).st_size
        self._waiting = b""
        self.synced = self._size

    def is_torn(self) -> bool:
        """Returns whether the file ends within a line, as a kill may leave it."""
        if not self._size:
            return False
        self._file.seek(self._size - 1)
        return self._file.read(1) != b"\n"

    def write(self, data: bytes) -> str:
        """Appends waiting data and `data`, as much as the disk takes."""
        self._waiting += data
        try:
            while self._waiting:
                written = self._file.write(self._waiting)
                self._size += written
                self._waiting = self._waiting[written:]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def newest(self, most: int, whole_from: int) -> bytes:
        """Returns the file's last whole lines and the waiting data.

        Args:
          most: Of how many bytes, at least if there are as many.
          whole_from: The byte from which on no line may be missing.
        """
        start = max(0, min(self._size - most, whole_from))
        self._file.seek(start)  # appends go to the end anyway
        data = self._file.readall()
        if start:  # within a line, or at its begin
            self._file.seek(start - 1)
            data = data if self._file.read(1) == b"\n" else data.partition(b"\n")[2]
        return data + self._waiting

    def sync(self) -> str:
        """Waits until the file is on the disk."""
        problem = self.write(b"")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        self.synced = self._size
        return problem

    def mend(self) -> str:
        """Writes the file again if another program deleted or replaced it.

        Returns what was done, for the user; "" if nothing was wrong. What another
        program wrote stays beside it, as "NAME.other". What one cut off is lost.

        Raises:
          OSError: It cannot be written, or not be read any more.
        """
        here, name = os.fstat(self._file.fileno()), self._path.name
        if here.st_size < self._size:
            lost, self._size = self._size - here.st_size, here.st_size
            self.synced = min(self.synced, self._size)
            return f"{name} was cut by {lost:,} bytes by another program: they are lost"
        other = ""
        try:
            if os.path.samestat(here, self._path.stat()):
                return ""
            other = f"{name}.other"
            self._path.replace(self._path.with_name(other))
        except FileNotFoundError:
            pass
        with replacing(self._path) as file:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
        self._file.close()
        self._file = _opened(self._path)
        done = f"replaced (by what is now {other})" if other else "deleted"
        return f"{name} was {done} while the run trained: it was written again"

    def close(self) -> str:
        """Closes the file; data that is still waiting is lost."""
        problem = self.write(b"")
        self._file.close()
        return problem


def _opened(path: Path) -> io.FileIO:
    return open(path, "a+b", buffering=0, opener=not_by_a_link)
