"""A process's own log: `logs/process-N.log` in the run's folder."""

import faulthandler
import time
import warnings
from pathlib import Path

INTERVAL = 10.0  # seconds between two lines of steps


class Log:
    """Where a process is, line by line, and its Python stacks when the job ends badly.

    The parent appends what the process printed to the same file.
    """

    def __init__(self, path: Path, title: str):
        """Opens the file, which keeps what is there.

        Raises:
          OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._phase, self._time = "", 0.0
        self._lost = False  # whether the disk took no more
        self.write(title)

    def write(self, text: str) -> None:
        """Appends a line, with the time."""
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            if not self._lost:
                name = self._file.name
                warnings.warn(
                    f"cannot write {name}: {error.strerror}; training goes on, and its "
                    "log has gaps",
                    stacklevel=2,
                )
            self._lost = True

    def place(self, phase: str, step: int) -> None:
        """Appends where the process is; of steps no more than one in ten seconds."""
        now = time.monotonic()
        in_steps = {phase, self._phase} <= {"data", "step", "computing"}
        if in_steps and now - self._time < INTERVAL:
            return
        self._phase, self._time = phase, now
        self.write(f"step {step}: {phase}")

    def stacks(self, why: str) -> None:
        """Appends the Python stacks of all threads."""
        self.write(f"{why}\nPython stacks:")
        faulthandler.dump_traceback(self._file, all_threads=True)
