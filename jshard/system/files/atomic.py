"""Atomic replacement of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, text: str) -> None:
    """Writes a text file atomically and durably; see ``replacing``."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file, which gets its name when it is complete and on the disk.

    A reader, also after a power cut, sees either the old content or the new one. The
    new content is on the disk when this ends.
    """
    # A process that was killed may leave one, or still be about to end.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Waits until files created or renamed in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
