"""What commands print, and a terminal that is closed under a process."""

import contextlib
import errno
import io
import os
import sys
import termios
from collections.abc import Iterator
from typing import Any

from jshard.system.formatting import printable


def show(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Prints text, which may quote names, values and samples of strangers.

    Args:
      text: What to print; it may have several lines.
      error: To standard error instead of standard output.
      end: What to print after it.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # it was closed when the process started
        return
    # A character that the output's encoding lacks is shown as Python writes it.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
    print(shown, end=end, file=stream, flush=True)


def is_terminal(stream: Any) -> bool:
    """Returns whether a standard stream is a terminal; a closed one is none.

    Open MPI's mpirun gives processes a terminal of its own, and copies what they print
    to its output, which may be a file.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return False
    return stream is not None and not stream.closed and stream.isatty()


def open_outputs() -> None:
    """Makes what this process prints printable, whatever its outputs are.

    A closed one becomes a file that nothing is kept of, before another file gets its
    number, and characters that an encoding lacks are escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file
            numbers.add(stream.fileno())
    return numbers
