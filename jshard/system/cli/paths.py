"""Checks the form of paths that users give."""

import os
import re
from pathlib import Path
from typing import TypeGuard

from jshard.system.errors import UserError

BUCKETS = ("gs", "s3")  # schemes of URLs that runs may have


def is_bucket(path: str | Path) -> TypeGuard[str]:
    """Returns whether a path is the URL of something in a bucket."""
    return isinstance(path, str) and path.startswith(tuple(f"{x}://" for x in BUCKETS))


def is_on_hub(path: str | Path) -> TypeGuard[str]:
    """Returns whether a path is a name on the Hugging Face Hub with hf://."""
    return isinstance(path, str) and path.startswith("hf://")


def is_remote(path: str | Path) -> TypeGuard[str]:
    """Returns whether a path is no local one, by its scheme."""
    return is_bucket(path) or is_on_hub(path)


def cache_folder(name: str) -> Path:
    """Returns ``$JSHARD_CACHE/NAME``, by default ``~/.cache/jshard/NAME``."""
    given = os.environ.get("JSHARD_CACHE", "")
    return Path(given or "~/.cache/jshard").expanduser() / name


def not_by_a_link(path: str, flags: int) -> int:
    """An opener for `open` that refuses a link, whose target would be written."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_path(
    name: str, path: str | Path, *, bucket: bool = False, hub: bool = False
) -> None:
    """Raises a UserError if no file can have a path, which was given as `name`.

    The arguments are those of `path_problem`.
    """
    if problem := path_problem(path, bucket=bucket, hub=hub):
        raise UserError(f"{name}={path}: {problem}")


def path_problem(path: str | Path, *, bucket: bool = False, hub: bool = False) -> str:
    """Returns why no file can have this path, as "is too long"; empty if one can.

    With `bucket`, it may be the URL of something in a bucket; with `hub`, it may begin
    with hf://, as names on the Hugging Face Hub do.
    """
    if bucket and is_bucket(path):
        fine = re.fullmatch(r"[a-z0-9]+://[\w.-]{3,}(/[^/\0]+)+/?", str(path))
        return "" if fine else "must be like s3://BUCKET/PATH"
    slashes = ":/" if isinstance(path, Path) else "://"  # a Path has dropped one
    text = str(path)
    if hub and text.startswith("hf:/"):
        return ""
    if re.match(rf"[A-Za-z][A-Za-z0-9+.-]+{slashes}", text):
        return (
            "is a URL, which this cannot be: copy what it needs to a disk, and give "
            "the path there (docs/how_to/buckets.md says what can be at gs:// and s3://)"
        )
    if "\0" in text:
        return "holds a zero byte, which no path does"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "begins with the name of an unknown user"
    parts = os.fsencode(os.path.expanduser(text)).split(os.fsencode(os.sep))
    if max(map(len, parts)) > 255 or sum(len(part) + 1 for part in parts) > 4000:
        return "is too long for a path"
    return ""
