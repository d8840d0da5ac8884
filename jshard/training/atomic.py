"""Files that are replaced whole."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
