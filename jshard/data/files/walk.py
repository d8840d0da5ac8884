"""The files of a folder and of its sub-folders, as Hugging Face's `datasets` sees them.

Links to folders are followed, each folder once. Names that begin with "." are hidden,
such as `.ipynb_checkpoints`, and so are folders that begin with "__", such as
`__MACOSX`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jshard.system.errors import UserError


def files_of(
    root: Path | str, skip: Callable[[str], bool] = lambda name: False
) -> Iterator[str]:
    """Yields the paths of the files under a folder, in no order to rely on.

    Args:
      root: The folder.
      skip: Whether a name, of a file or a folder, is left out besides hidden ones.

    Raises:
      OSError: A folder cannot be read.
    """
    yield from _walk(str(root), skip, {_identity(root)})


def _walk(
    folder: str, skip: Callable[[str], bool], seen: set[tuple[int, int]]
) -> Iterator[str]:
    with os.scandir(folder) as entries:
        # Links last, so that a folder is found where it lies, not where it is named.
        found = sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name))
    for entry in found:
        if entry.name.startswith(".") or skip(entry.name):
            continue
        if not entry.is_dir():
            yield entry.path
        elif not entry.name.startswith("__") and _identity(entry.path) not in seen:
            seen.add(_identity(entry.path))
            yield from _walk(entry.path, skip, seen)


def _identity(folder: Path | str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror}); make it "
            "readable, or move it out of data.path"
        ) from error
