"""The user's TOML files: of a cluster, and of prices."""

import tomllib
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_text


def read_toml(option: str, path: Path) -> dict[str, Any]:
    """Reads the file of an option.

    Raises:
      UserError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"{option}={path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{option}={path}: is not TOML ({error})") from error
