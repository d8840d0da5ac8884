"""The secret of a job: its processes have it, and a stranger does not.

It never stands on a command line, which every user of a machine can read, nor in a
message, a log or a config.
"""

import functools
import os
import secrets
import stat
from pathlib import Path

from jshard.system.errors import UserError

# Environment variables; the first one is set by jshard.launch.
SECRET, SECRET_FILE = "JSHARD_SECRET", "JSHARD_SECRET_FILE"
SHORTEST, LONGEST = 16, 4096  # bytes
_MAKE = "`openssl rand -hex 32` makes a secret"


def new_secret() -> str:
    """Returns 256 random bits, as text on one line."""
    return secrets.token_hex(32)


@functools.cache
def given_secret() -> bytes | None:
    """Returns the secret that this process was given, or None.

    It is removed from the environment, as processes that this one starts need it not.

    Raises:
      UserError: It cannot be read, others could read it, or it is too short.
    """
    text, file = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if text is not None:
        secret = _checked(text.encode(), SECRET)
        del os.environ[SECRET]
        return secret
    return read_secret(Path(file), f"{SECRET_FILE}={file}") if file else None


def read_secret(file: Path, shown: str) -> bytes:
    """Returns the secret in a file, which is this user's alone.

    Args:
      file: That holds it.
      shown: What the user calls it, for messages.

    Raises:
      UserError: It cannot be read, others could read it, or it is too short.
    """
    try:
        # A pipe would not be opened before somebody writes.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{shown}: is no file")
            _check_private(found, shown, 600)
            return _checked(opened.read(LONGEST + 1), shown)
    except OSError as error:
        raise UserError(f"{shown}: cannot be read: {error.strerror}") from error


def check_private_folder(folder: Path, shown: str) -> None:
    """Raises UserError unless a folder is this user's alone."""
    try:
        found = folder.stat()
    except OSError as error:
        raise UserError(f"{shown}: {folder}: {error.strerror}") from error
    _check_private(found, f"{shown}: {folder}", 700)


def _check_private(found: os.stat_result, shown: str, mode: int) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise UserError(f"{shown}: belongs to another user")
    if found.st_mode & 0o077:
        now = f"{found.st_mode & 0o777:o}"
        raise UserError(f"{shown}: other users have access (mode {now}); chmod {mode}")


def _checked(secret: bytes, shown: str) -> bytes:
    secret = secret.strip()
    if not SHORTEST <= len(secret) <= LONGEST:
        raise UserError(
            f"{shown}: must have {SHORTEST} to {LONGEST} bytes, not {len(secret)}; "
            f"{_MAKE}"
        )
    return secret
