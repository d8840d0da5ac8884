"""Each process's log: `logs/process-N.log` in the run's folder."""

import faulthandler
import time
from pathlib import Path

from jshard.system.cli.paths import not_by_a_link
from jshard.system.errors import warn
from jshard.system.jobs.stuck import STEP

INTERVAL = 10.0  # seconds between lines about steps


class Log:
    """Records where a process is, and its Python stacks if the job ends badly.

    The parent appends to the same file what the process printed.
    """

    def __init__(self, path: Path, title: str):
        """Opens the file for appending; raises OSError if it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(  # noqa: SIM115
            path, "a", encoding="utf-8", buffering=1, opener=not_by_a_link
        )
        self._phase, self._time = "", 0.0
        self._warned = False
        self.write(title)

    def write(self, text: str) -> None:
        """Appends a line with the time; warns once if the disk takes no more."""
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            if not self._warned:
                warn(
                    f"cannot write {self._file.name}: {error.strerror}; training "
                    "continues, and its log has gaps"
                )
            self._warned = True

    def place(self, phase: str, step: int) -> None:
        """Appends where the process is; about steps one line in ten seconds at most."""
        now = time.monotonic()
        stepping = {phase, self._phase} <= set(STEP)
        if stepping and now - self._time < INTERVAL:
            return
        self._phase, self._time = phase, now
        self.write(f"step {step}: {phase}")

    def stacks(self, why: str) -> None:
        """Appends the Python stacks of all threads."""
        self.write(f"{why}\nPython stacks:")
        faulthandler.dump_traceback(self._file, all_threads=True)
