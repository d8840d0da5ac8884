"""The parent over a worker: passes signals on, and tells of ends the worker cannot.

What stands in JAX's C++ (a fatal error aborts the process, 134) no Python of the worker
sees. The parent sees it all: the worker's standard error, its last signs of life, and
how it ended.
"""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from jshard.distributed.cluster import Cluster
from jshard.distributed.heartbeat import GRACE, PERIOD, SILENCE
from jshard.distributed.status import PARENT_FD, STATUS_FD

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
LAST_LINES = 30  # of standard error, shown where nothing else explains an end
HINT = 30.0  # seconds of waiting for other processes, before it is told
SHOW_CURSOR = "\x1b[?25h\n"  # of a terminal
LEAVING = 20.0  # seconds that a worker may take to exit once it is through

# Lines of XLA's log, and of Gloo. What follows an error belongs to it.
_FROM_CPP = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|\[Gloo\]|.* peer ranks is : ")
_PEER_DIED = "JAX distributed service detected fatal errors"


def supervise(cluster: Cluster, command: list[str]) -> int:
    """Runs a worker, and returns the exit code to end with.

    Args:
      cluster: the job that the worker is part of.
      command: that starts it.

    Returns:
      The worker's exit code; 1 where a signal, an abort or the parent ended it.
    """
    return _Parent(cluster, command).run()


class _Parent:
    def __init__(self, cluster: Cluster, command: list[str]):
        self._index, self._cluster = cluster.process_id, cluster
        status, theirs = os.pipe()
        ours, self._alive = os.pipe()  # ends with this process
        self._worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {STATUS_FD: str(theirs), PARENT_FD: str(ours)},
            pass_fds=(theirs, ours),
            start_new_session=True,  # Ctrl-C comes once: from here
        )
        os.close(theirs)
        os.close(ours)
        self._said: dict[str, Any] = {}  # by the worker
        self._heard: float | None = None  # when; None before the first sign of life
        self._log: IO[bytes] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._waiting_since: float | None = None  # for the other processes
        self._fatal = False  # whether C++ told of a dead process
        self._passed: set[int] = set()  # signals
        self._threads = [
            threading.Thread(target=self._read_status, args=[status], daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]

    def run(self) -> int:
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: self._pass_on(number))
        for thread in self._threads:
            thread.start()
        why, last = "", time.monotonic()
        while (code := self._poll()) is None:
            pause = time.monotonic() - last - PERIOD
            last += PERIOD + pause
            if self._heard is not None and pause > PERIOD:  # this process was stopped
                self._heard += pause
            self._hint(last)
            why = why or self._overdue()
            if why:
                self._worker.kill()
        for thread in self._threads:  # to the end of what it said
            thread.join(timeout=GRACE)
        if code and sys.stdout.isatty():  # it may have died in its live line
            sys.stdout.write(SHOW_CURSOR)
            sys.stdout.flush()
        return self._explain(code, why)

    def _hint(self, now: float) -> None:
        """Tells once of other processes that do not come."""
        since = self._waiting_since
        if self._heard is None and since is not None and now - since > HINT:
            self._waiting_since = None
            print(
                f"jshard: process {self._index}: still waiting for all "
                f"{self._cluster.num_processes} processes to start and reach "
                f"{self._cluster.coordinator or 'process 0'}",
                file=sys.stderr,
            )

    def _poll(self) -> int | None:
        try:
            return self._worker.wait(PERIOD / 2)
        except subprocess.TimeoutExpired:
            return None

    def _pass_on(self, number: int) -> None:
        if self._worker.poll() is None:
            self._passed.add(number)
            self._worker.send_signal(number)

    def _overdue(self) -> str:
        """Why the worker is to be killed; empty when it lives."""
        if self._heard is None:
            return ""
        quiet = time.monotonic() - self._heard
        if "ending" in self._said:
            return "did not exit" if quiet > LEAVING else ""
        silence = self._said.get("silence", SILENCE)
        if quiet <= silence + PERIOD:
            return ""
        return f"gave no sign of life for {silence:g} s (stopped?): killed"

    def _read_status(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                said = json.loads(line)
                self._said |= said
                if "phase" in said:
                    self._waiting_since = time.monotonic()
                if "place" in self._said:
                    self._heard = time.monotonic()
                path = self._said.get("log")
                if path and self._log is None:
                    with contextlib.suppress(OSError):  # as in `_write_log`
                        self._log = Path(path).open("ab", buffering=0)  # noqa: SIM115
                    self._write_log("".join(self._lines).encode())

    def _write_log(self, text: bytes) -> None:
        if self._log is not None:
            # A full disk costs lines of the log: the worker's own log tells of it.
            with contextlib.suppress(OSError):
                self._log.write(text)

    def _read_errors(self) -> None:
        assert self._worker.stderr is not None
        error = False  # whether this line belongs to one of C++
        for raw in self._worker.stderr:
            line = raw.decode(errors="replace")
            self._write_log(raw)
            self._lines.append(line)
            self._fatal |= _PEER_DIED in line
            from_cpp = _FROM_CPP.match(line) is not None
            if from_cpp or line.startswith(("jshard: ", "Traceback")):
                error = from_cpp and line.startswith(("E", "F"))
            ours = line.startswith("jshard: process ")
            if not (from_cpp or error) and (self._index == 0 or ours):
                sys.stderr.write(line)
                sys.stderr.flush()

    def _explain(self, code: int, why: str) -> int:
        """Tells of an end that the worker did not tell of."""
        if "ending" in self._said:
            return self._said["ending"]
        if not why and code >= 0 and not self._fatal:
            self._show_errors(code)
            return code
        if -code in self._passed:  # before it could listen
            print(f"jshard: {signal.Signals(-code).name}: ended", file=sys.stderr)
            return 128 - code
        where = self._said.get("place", "its start")
        why = why or self._of_signal(-code)
        places = self._said.get("places")
        more = f"; the last places: {places}" if places else ""
        who = f"process {self._index}, at {where},"
        print(f"jshard: error: {who} {why}{more}", file=sys.stderr)
        if "log" in self._said:
            print(f"jshard: see {self._said['log']}", file=sys.stderr)
        elif not self._fatal:
            self._show_errors(code)
        return 1

    def _of_signal(self, number: int) -> str:
        if self._fatal and "place" not in self._said:
            return (
                f"waited in vain for all {self._cluster.num_processes} processes to "
                f"start and reach {self._cluster.coordinator or 'process 0'}"
            )
        if self._fatal:
            return "was aborted by JAX: process 0, which coordinates, is gone"
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGKILL:
            name += ", as by a kernel that is out of memory"
        return f"was ended by {name}"

    def _show_errors(self, code: int) -> None:
        """Shows the last of standard error, of a process whose errors are held back."""
        if code and self._index:
            for line in self._lines:
                sys.stderr.write(f"process {self._index}: {line}")
