"""The one place that prints: nothing that is printed controls the terminal."""

import sys

from jshard.formatting import printable


def show(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Prints text, which may quote names, values and samples of strangers.

    Args:
      text: What to print; it may have several lines.
      error: To standard error instead of standard output.
      end: What to print after it.
    """
    stream = sys.stderr if error else sys.stdout
    print(printable(text), end=end, file=stream, flush=True)
