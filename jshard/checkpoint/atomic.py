"""Files that are replaced whole."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole: a reader sees the old text or the new, never a part.

    That holds after a power cut, too; the new one is on the disk when this returns.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Waits until what was created or renamed in a folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
