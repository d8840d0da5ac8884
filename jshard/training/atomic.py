"""Files that are replaced whole."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole: a reader sees the old text or the new, never a part.

    That holds after a power cut, too.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
