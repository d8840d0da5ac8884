"""Where a launcher's processes run, and where they meet if that is this machine."""

import contextlib
import fcntl
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jshard.system.cli.paths import path_problem
from jshard.system.errors import UserError

RSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5"
UNIX = "unix:"
LONGEST_PATH = 100  # bytes of a socket's path; macOS has room for 103, Linux for 107


_FOLDER, _SOCKET = "jshard-meeting-", "meeting"


@contextlib.contextmanager
def private_socket() -> Iterator[str]:
    """Yields "unix:PATH", in a new folder that other users cannot enter.

    They could reach a port. Removes what killed launchers of this user have left: a
    launcher locks its folder, and the kernel unlocks it when the launcher ends.

    Raises:
      UserError: The folder of temporary files is too deep.
    """
    temporary = Path(tempfile.gettempdir())
    for left in temporary.glob(f"{_FOLDER}*"):
        _remove_if_unlocked(left)
    folder, lock = _make_locked(temporary)
    try:
        socket = folder / _SOCKET
        if len(os.fsencode(socket)) > LONGEST_PATH:
            raise UserError(
                f"TMPDIR={temporary}: too long for a socket; set a shorter one, or "
                "give --port=N"
            )
        yield f"{UNIX}{socket}"
    finally:
        _remove(folder, lock)
        os.close(lock)


def _make_locked(temporary: Path) -> tuple[Path, int]:
    """Returns a new folder, and what locks it until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=temporary))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # no locks here: so nobody removes it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another launcher has removed it before it was locked


def _remove_if_unlocked(folder: Path) -> None:
    """Removes a folder of this user whose launcher has ended."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(contextlib.suppress(OSError))  # another user's, or locked
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        undo.callback(os.close, lock)
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    """Removes a folder, which has nothing but the socket or stays."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_SOCKET, dir_fd=lock)
    with contextlib.suppress(OSError):
        folder.rmdir()


def parse_hosts(option: str, text: str | None) -> list[str]:
    """Returns the names in "A,B,..."; raises UserError if one is none."""
    hosts = [] if text is None else text.split(",")
    for host in hosts:
        if not re.fullmatch(r"[^\s-]\S{0,254}", host):
            raise UserError(
                f"--{option}={text}: {host!r} is not a host name; must be A,B,... or "
                "USER@A,..."
            )
    return hosts


def parse_rsh(text: str) -> list[str]:
    """Returns the words of the command that reaches a host, or raises UserError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--rsh={text}: {error}") from error
    if not words or path_problem(words[0]):
        raise UserError(f"--rsh={text}: must be a command, like {RSH}")
    return words
