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
from typing import Any


def run_tasks(
    command: Sequence[str],
    tasks: Iterable[dict[str, Any]],
    *,
    processes: int,
    timeout: float,
    environment: dict[str, str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Has processes do tasks; each does many, one after the other.

    However the iteration ends, by Ctrl-C too, the processes end with it, and so do
    those that they started.

    Args:
      command: starts a process that reads a task, a line of JSON, and writes a line
        of JSON as its reply.
      tasks: what to do; the next one is asked for when a process is free.
      processes: how many at once.
      timeout: seconds after which a task is given up.
      environment: of the processes.

    Yields:
      (the task's index, its reply) as they come. A process that dies costs its task
      only: the reply is ``{"error": what happened}``.
    """
    waiting = enumerate(tasks)
    idle: list[_Process] = []
    busy: dict[_Process, int] = {}
    try:
        while True:
            for index, task in itertools.islice(waiting, processes - len(busy)):
                process = idle.pop() if idle else _Process(command, environment)
                busy[process] = index
                process.give(task, timeout)
            if not busy:
                return
            patience = min(process.deadline for process in busy) - time.monotonic()
            ready, _, _ = select.select(list(busy), [], [], max(patience, 0))
            late = [p for p in busy if time.monotonic() >= p.deadline]
            for process in ready or late:
                index = busy.pop(process)
                reply = process.reply() if process in ready else None
                if reply is not None:
                    idle.append(process)
                    yield index, reply
                else:
                    said = f"took longer than {timeout:.0f} s"
                    yield index, {"error": process.died() if ready else said}
                    process.end()
    finally:
        for process in [*busy, *idle]:
            process.end()


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
