"""The other processes of a job, as one of them sees them.

The rest of jshard need not know how many processes there are. A single process has no
peers, and every method returns at once.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jshard.distributed.stuck import IdleDetector, Patience


class Peers:
    """A single process; also the interface of a process in a job.

    Attributes:
      index: rank of this process.
      count: number of processes.
      hosts: the host of each process, as numbers from 0.
      shown: called with each phase and step, if there is one.
    """

    shown: Callable[[str, int], None] | None = None
    index = 0
    count = 1
    hosts: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._idle: IdleDetector | None = None
        self._patience = Patience()

    def at(self, phase: str, step: int) -> None:
        """Sets what this process is doing, in or after which step."""
        if self.shown is not None:
            self.shown(phase, step)
        if self._idle is not None:
            self._idle.at(phase, step, self._patience.at(phase))

    def limit(self, silence: float, stuck: float | None) -> None:
        """Sets `watch.silence` and `watch.stuck` in seconds; None learns the latter."""
        self._patience = Patience(stuck)

    def share(self, name: str, text: str) -> list[str]:
        """Returns the text of every process; all must call it with the same name.

        It may be called in a thread, a name always in the same.
        """
        return [text]

    def publish(self, name: str, text: str) -> str:
        """Returns process 0's text; otherwise like `share`."""
        return self.share(name, "" if self.index else text)[0]

    def open_log(self, folder: Path) -> None:
        """Opens this process's log in a run's folder."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches over the processes within it, and tells if they are stuck."""
        with IdleDetector(print_line) as self._idle:
            try:
                yield
            finally:
                self._idle = None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Reports an error raised within it to all processes at once.

        Without it, context managers around the error would exit first, which may
        wait for the other processes.
        """
        return contextlib.nullcontext()


def print_line(text: str) -> None:
    """Prints a line to standard error, from any thread."""
    newline = "\n" if sys.stdout.isatty() else ""  # below the live line
    os.write(2, f"{newline}jshard: {text}\n".encode())
