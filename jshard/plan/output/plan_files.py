"""The files that the command is asked to write: checked before, written at the end."""

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from jshard.storage.hub.online.outputs import names_at, write_text
from jshard.system.cli.paths import is_remote
from jshard.system.errors import UserError
from jshard.system.files.atomic import replace_file


def check_files(arguments: SimpleNamespace, names: Iterable[str]) -> None:
    """Raises UserError for a file that could not be written in the end."""
    for name in names:
        path = getattr(arguments, name)
        if is_remote(path):
            names_at(path)  # with the same credentials
        elif path:
            if path.is_dir():
                raise UserError(f"--{name}={path}: this is a folder")
            if not path.parent.is_dir():
                raise UserError(f"--{name}={path}: there is no folder {path.parent}")
            if not os.access(path.parent, os.W_OK):
                raise UserError(f"--{name}={path}: cannot write in {path.parent}")


def write_file(name: str, path: Path | str, text: str) -> None:
    """Writes the file of an option.

    Raises:
      UserError: it cannot be written.
    """
    if is_remote(path):
        write_text(path, text)
        return
    try:
        replace_file(Path(path), text)
    except OSError as error:
        raise UserError(f"--{name}={path}: {error.strerror}") from error
