"""The parent of a worker: passes signals on and reports how the worker ended.

JAX's C++ aborts a process on fatal errors (exit code 134), which its Python cannot
report. The parent can: it reads the worker's standard error, its last signs of life,
and how it ended.
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
from typing import IO, Any

from jshard.system.cli.paths import not_by_a_link
from jshard.system.cli.terminal import (
    is_terminal,
    leave_closed_terminal,
    outliving_terminal,
    show,
)
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.status import (
    GRACE,
    PARENT_FD,
    PERIOD,
    SILENCE,
    STATUS_FD,
    has_parent,
)

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
JOB_FAILED = signal.SIGUSR2  # by jshard.launch: another process has ended
LAST_LINES = 30  # of standard error, shown if nothing else explains the end
HINT = 30.0  # seconds of waiting for other processes before a message
SHOW_CURSOR = "\x1b[?25h\n"  # for terminals
LEAVING = 20.0  # seconds that a worker may take to exit at its end

# Log lines of XLA and Gloo. Lines that follow an error belong to it.
_FROM_CPP = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|\[Gloo\]|.* peer ranks is : ")
_PEER_DIED = "JAX distributed service detected fatal errors"


def supervise(cluster: Cluster | None) -> None:
    """Runs this command as a worker below this process, and exits with its exit code.

    That is 1 if a signal, an abort or this process ended it. Returns at once in the
    worker, and where there is no job.
    """
    if cluster is not None and not has_parent():
        sys.exit(_Supervisor(cluster, [sys.executable, *sys.orig_argv[1:]]).run())


class _Supervisor:
    def __init__(self, cluster: Cluster, command: list[str]):
        self._index = cluster.process_id
        self._all = (  # what the worker waits for at its start
            f"all {cluster.num_processes} processes to start and reach "
            f"{cluster.coordinator or 'process 0'}"
        )
        status, theirs = os.pipe()
        ours, self._alive = os.pipe()  # closes when this process ends
        self._worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {STATUS_FD: str(theirs), PARENT_FD: str(ours)},
            pass_fds=(theirs, ours),
            start_new_session=True,  # so that Ctrl-C reaches it once, from here
        )
        os.close(theirs)
        os.close(ours)
        self._status: dict[str, Any] = {}  # reported by the worker
        self._heard: float | None = None  # when; None before the first sign of life
        self._log: IO[bytes] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._waiting_since: float | None = None  # for the other processes
        self._peer_died = False  # by what C++ wrote
        self._passed: set[int] = set()  # signals
        self._in_vain = False  # whether the launcher said that another process ended
        self._threads = [
            threading.Thread(target=self._read_status, args=[status], daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]

    def run(self) -> int:
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._pass_on(number))
        signal.signal(JOB_FAILED, lambda number, frame: self._give_up())
        for thread in self._threads:
            thread.start()
        why, last = "", time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._worker.wait(PERIOD / 2)
                break
            now = time.monotonic()
            if self._heard is not None and now - last > 2 * PERIOD:
                self._heard += now - last - PERIOD  # this process itself was stopped
            last = now
            self._hint(now)
            why = why or self._overdue()
            if why:
                self._worker.kill()
        with contextlib.suppress(ProcessLookupError):  # processes of a data loader
            os.killpg(self._worker.pid, signal.SIGKILL)
        for thread in self._threads:  # reads the rest of the output
            thread.join(timeout=GRACE)
        if code and is_terminal(sys.stdout):  # it may have died in its live line
            sys.stdout.write(SHOW_CURSOR)
            sys.stdout.flush()
        return self._explain(code, why)

    def _hint(self, now: float) -> None:
        """Says once that other processes have not come."""
        since = self._waiting_since
        if self._heard is None and since is not None and now - since > HINT:
            self._waiting_since = None
            who = f"process {self._index}"
            show(f"jshard: {who}: still waiting for {self._all}", error=True)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if self._worker.poll() is None:
            self._passed.add(number)
            self._worker.send_signal(number)

    def _give_up(self) -> None:
        """Ends a worker that has not joined: another process of the job has ended."""
        if self._heard is None:
            self._in_vain = True
            self._worker.kill()

    def _overdue(self) -> str:
        """Returns why the worker must be killed, or an empty text."""
        if self._heard is None:
            return ""
        quiet = time.monotonic() - self._heard
        if "ending" in self._status:
            return "did not exit" if quiet > LEAVING else ""
        silence = self._status.get("silence", SILENCE)
        if quiet <= silence + PERIOD:
            return ""
        return f"gave no sign of life for {silence:g} s (stopped?): killed"

    def _read_status(self, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                reported = json.loads(line)
                self._status |= reported
                if "phase" in reported:
                    self._waiting_since = time.monotonic()
                if "place" in self._status:
                    self._heard = time.monotonic()
                path = self._status.get("log")
                if path and self._log is None:
                    with contextlib.suppress(OSError):  # as in `_write_log`
                        self._log = open(  # noqa: SIM115
                            path, "ab", buffering=0, opener=not_by_a_link
                        )
                    self._write_log("".join(self._lines).encode())

    def _write_log(self, text: bytes) -> None:
        if self._log is not None:
            # Ignores a full disk, which the worker reports when it writes its log.
            with contextlib.suppress(OSError):
                self._log.write(text)

    def _read_errors(self) -> None:
        assert self._worker.stderr is not None
        cpp_error = False  # whether this line belongs to an error of C++
        for raw in self._worker.stderr:
            line = raw.decode(errors="replace")
            self._write_log(raw)
            self._lines.append(line)
            self._peer_died |= _PEER_DIED in line
            from_cpp = _FROM_CPP.match(line) is not None
            if from_cpp or line.startswith(("jshard: ", "Traceback")):
                cpp_error = from_cpp and line.startswith(("E", "F"))
            ours = line.startswith("jshard: process ")
            if not (from_cpp or cpp_error) and (self._index == 0 or ours):
                with outliving_terminal():
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _explain(self, code: int, why: str) -> int:
        """Reports an end that the worker did not report; returns the exit code."""
        if "ending" in self._status:
            return self._status["ending"]
        if self._in_vain:  # the launcher or that process has said why
            return 1
        if not why and code >= 0 and not self._peer_died:
            self._show_errors(code)
            return code
        if -code in self._passed:  # before the worker handled signals
            show(f"jshard: {signal.Signals(-code).name}: ended", error=True)
            return 128 - code
        where = self._status.get("place", "its start")
        places = self._status.get("places")
        last = f"; last reported: {places}" if places else ""
        who = f"process {self._index}, at {where},"
        why = why or self._reason(-code)
        show(f"jshard: error: {who} {why}{last}", error=True)
        if "log" in self._status:
            show(f"jshard: see {self._status['log']}", error=True)
        elif not self._peer_died:
            self._show_errors(code)
        return 1

    def _reason(self, number: int) -> str:
        if self._peer_died and "place" not in self._status:
            return f"gave up waiting for {self._all}"
        if self._peer_died:
            return "was aborted by JAX: process 0, which coordinates, is gone"
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGKILL:
            name += ", as by a kernel that is out of memory"
        return f"was ended by {name}"

    def _show_errors(self, code: int) -> None:
        """Shows the end of standard error, which only process 0 forwards."""
        if code and self._index:
            for line in self._lines:
                sys.stderr.write(f"process {self._index}: {line}")
