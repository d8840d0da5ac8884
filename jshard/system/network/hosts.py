"""Where a launcher's processes run, and where they meet if that is this machine."""

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator

from jshard.system.cli.paths import path_problem
from jshard.system.errors import UserError

RSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5"
UNIX = "unix:"
LONGEST_PATH = 100  # bytes of a socket's path; macOS has room for 103, Linux for 107


@contextlib.contextmanager
def private_socket() -> Iterator[str]:
    """Yields "unix:PATH", in a new folder that other users cannot enter.

    They could reach a port. Raises UserError if temporary files' folder is too deep.
    """
    with tempfile.TemporaryDirectory(prefix="jshard-") as folder:
        socket = f"{folder}/meeting"
        if len(os.fsencode(socket)) > LONGEST_PATH:
            raise UserError(
                f"TMPDIR={tempfile.gettempdir()}: too long for a socket; set a shorter "
                "one, or give --port=N"
            )
        yield f"{UNIX}{socket}"


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
