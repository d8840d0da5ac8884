"""Checks the form of paths that users give."""

import os
import re
from pathlib import Path

from jshard.errors import UserError


def check_path(name: str, path: str | Path, *, hub: bool = False) -> None:
    """Raises a UserError if no file can have a path, which was given as `name`."""
    if problem := path_problem(path, hub=hub):
        raise UserError(f"{name}={path}: {problem}")


def path_problem(path: str | Path, *, hub: bool = False) -> str:
    """Returns why no file can have this path, as "is too long"; empty if one can.

    With ``hub`` it may begin with hf://, too, as names on the Hugging Face Hub do.
    """
    slashes = ":/" if isinstance(path, Path) else "://"  # a Path has dropped one
    text = str(path)
    if hub and text.startswith("hf:/"):
        return ""
    if re.match(rf"[A-Za-z][A-Za-z0-9+.-]+{slashes}", text):
        return (
            "is a URL, and jshard reads and writes files alone: copy what it needs to "
            "a disk, or mount the bucket, and give the path there"
        )
    if "\0" in text:
        return "holds a zero byte, which no path does"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "begins with the name of an unknown user"
    parts = os.fsencode(os.path.expanduser(text)).split(os.fsencode(os.sep))
    if max(map(len, parts)) > 255 or sum(len(part) + 1 for part in parts) > 4000:
        return "is too long for a path"
    return ""
