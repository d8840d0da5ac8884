"""Worker processes for tasks, any of which may kill its process."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

Task = dict[str, Any]
# (index of the task, its reply) in order of completion.
Replies = Generator[tuple[int, dict[str, Any]], None, None]


def run_tasks(
    tasks: Iterable[Task],
    command: Sequence[str],
    *,
    processes: int,
    timeout: float,
    environment: dict[str, str],
) -> Replies:
    """Runs tasks, and yields their replies.

    Tasks are read lazily: the next one when a process is free. If the process dies or
    the task takes too long, the reply is ``{"error": reason}``. However it ends, by
    Ctrl-C too, the processes and their children are killed.

    Args:
      tasks: any number of them.
      command: of a process that reads tasks and writes replies, one line of JSON each.
      processes: the most that run at a time, started when they are needed.
      timeout: seconds that one task may take.
      environment: of the processes.
    """
    waiting, idle, busy = enumerate(tasks), list[_Process](), dict[_Process, int]()
    try:
        while True:
            for index, task in itertools.islice(waiting, processes - len(busy)):
                process = idle.pop() if idle else _Process(command, environment)
                busy[process] = index
                process.send(task, timeout)
            if not busy:
                return
            patience = min(p.deadline for p in busy) - time.monotonic()
            ready, _, _ = select.select(list(busy), [], [], max(patience, 0))
            late = [p for p in busy if time.monotonic() >= p.deadline]
            for process in ready or late:
                reply = process.receive() if ready else None
                if reply is not None:
                    idle.append(process)
                else:
                    error = f"took longer than {timeout:.0f} s"
                    reply = {"error": process.cause_of_death() if ready else error}
                    process.end()
                yield busy.pop(process), reply
    finally:
        for process in (*idle, *busy):
            process.end()


class _Process:
    """A worker process."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # a process group for it and its children
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.tasks, self.replies = self.process.stdin, self.process.stdout
        self.deadline = 0.0

    def fileno(self) -> int:
        """Lets ``select`` wait for a reply."""
        return self.replies.fileno()

    def send(self, task: Task, timeout: float) -> None:
        """Sends a task. If the process is dead, ``receive`` returns None."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=self.tasks, flush=True)
        self.deadline = time.monotonic() + timeout

    def receive(self) -> dict[str, Any] | None:
        """Reads a reply, whose first bytes have arrived; None if the process died."""
        line = self.replies.readline()
        return json.loads(line) if line.endswith("\n") else None

    def cause_of_death(self) -> str:
        """Waits for its end; returns the signal or exit code, and its last words."""
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        # XLA and Python print a stack trace after their fatal error.
        fatal = [line for line in lines if line.startswith(("F0", "F1", "Fatal"))]
        words = (fatal or lines)[-1:]
        return ": ".join([f"the compiling process died by {how}", *words])

    def end(self) -> None:
        """Kills the process and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for file in (self.tasks, self.replies, self.errors):
            with contextlib.suppress(BrokenPipeError):  # of a task never read
                file.close()
