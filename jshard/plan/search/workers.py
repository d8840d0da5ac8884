"""Tasks done by processes of their own, of which any may die."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self


class Workers:
    """Processes that do tasks; a context manager, which leaves none behind.

    However the block ends, by Ctrl-C too, they end with it, and so does what they
    started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        timeout: float,
        environment: dict[str, str],
    ):
        """Starts nothing yet.

        Args:
          command: starts a process that reads a task, a line of JSON, and writes a
            line of JSON as its reply, and so on.
          processes: how many at once.
          timeout: seconds after which a task is given up.
          environment: of the processes.
        """
        self.command, self.environment = command, environment
        self.processes, self.timeout = processes, timeout
        self.started: list[_Process] = []
        self.idle: list[_Process] = []
        self.busy: dict[_Process, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.end()

    def run(
        self, tasks: Iterable[dict[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Has them do tasks; each does many, one after the other.

        Args:
          tasks: the next one is asked for when a process is free.

        Yields:
          (the task's index, its reply) as they come. A process that dies costs its
          task only: the reply is ``{"error": what happened}``.
        """
        waiting = enumerate(tasks)
        while True:
            free = self.processes - len(self.busy)
            for index, task in itertools.islice(waiting, free):
                process = self.idle.pop() if self.idle else self._start()
                self.busy[process] = index
                process.give(task, self.timeout)
            if not self.busy:
                return
            yield from self._replies()

    def _start(self) -> "_Process":
        process = _Process(self.command, self.environment)
        self.started.append(process)
        return process

    def _replies(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Waits for one; those that are there, and what was given up."""
        patience = min(p.deadline for p in self.busy) - time.monotonic()
        ready, _, _ = select.select(list(self.busy), [], [], max(patience, 0))
        late = [p for p in self.busy if time.monotonic() >= p.deadline]
        for process in ready or late:
            reply = process.reply() if ready else None
            index = self.busy.pop(process)
            if reply is not None:
                self.idle.append(process)
            else:
                said = f"took longer than {self.timeout:.0f} s"
                reply = {"error": process.died() if ready else said}
                process.end()
            yield index, reply


class _Process:
    """One of them."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # a group of its own, with what it starts
        )
        self.deadline = 0.0

    def fileno(self) -> int:
        """For ``select``."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, task: dict[str, Any], timeout: float) -> None:
        """Hands it a task; of a dead one the reply tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=self.process.stdin, flush=True)
        self.deadline = time.monotonic() + timeout

    def reply(self) -> dict[str, Any] | None:
        """The reply, which has begun to come; None where the process died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def died(self) -> str:
        """What ended it: a signal or an exit code, and its last words."""
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        # XLA's and Python's last words, which a stack of frames follows.
        fatal = [line for line in lines if line.startswith(("F0", "F1", "Fatal"))]
        words = (fatal or lines)[-1:]
        return ": ".join([f"the compiling process died by {how}", *words])

    def end(self) -> None:
        """Ends it, and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):  # of a task never read
                file.close()
