"""What commands print, and a terminal that is closed under a process."""

import contextlib
import errno
import os
import sys
import termios
from collections.abc import Iterator

from jshard.cli.formatting import printable


def show(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Prints text, which may quote names, values and samples of strangers.

    Args:
      text: What to print; it may have several lines.
      error: To standard error instead of standard output.
      end: What to print after it.
    """
    stream = sys.stderr if error else sys.stdout
    print(printable(text), end=end, file=stream, flush=True)


def leave_closed_terminal() -> None:
    """Sends what this process prints nowhere if its terminal is gone.

    Otherwise every print would raise an error, and so would Python at its end.
    """
    for number in _outputs():
        try:
            termios.tcgetattr(number)
        except termios.error as error:  # of a file or a pipe it is ENOTTY
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Within it what is printed may be lost, if its terminal is gone."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_closed_terminal()


def _outputs() -> set[int]:
    numbers = {1, 2}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # it is no file
            numbers.add(stream.fileno())
    return numbers
