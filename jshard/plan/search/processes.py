"""A process for each candidate, which may die while it compiles."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from concurrent import futures
from typing import Any

TIMEOUT = 600.0  # seconds to compile a candidate


def run_each(
    commands: Sequence[Sequence[str]],
    environment: dict[str, str],
    *,
    at_a_time: int,
    timeout: float = TIMEOUT,
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Runs commands; yields (index, reply) of each in order of completion.

    A command prints its reply, an object in JSON. If it dies or takes too long, the
    reply is ``{"error": reason}``. However the generator ends, by Ctrl-C too, all
    processes and their children are killed; a command's standard input ends when this
    process does.
    """
    running: set[subprocess.Popen[str]] = set()
    ours, theirs = os.pipe()

    def run(command: Sequence[str]) -> dict[str, Any]:
        process = subprocess.Popen(
            command,
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # a process group for it and its children
        )
        running.add(process)
        try:
            reply, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return {"error": f"took longer than {timeout:.0f} s"}
        finally:
            running.remove(process)
        if process.returncode:
            return {"error": _cause_of_death(process.returncode, said)}
        return json.loads(reply)

    pool = futures.ThreadPoolExecutor(at_a_time)
    try:
        numbers = {pool.submit(run, command): n for n, command in enumerate(commands)}
        for done in futures.as_completed(numbers):
            yield numbers[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        os.close(theirs)
        for process in [*running]:
            _kill(process)
        pool.shutdown()
        os.close(ours)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)


def _cause_of_death(code: int, said: str) -> str:
    """Returns the signal or exit code of a process, and its last words."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # XLA and Python print a stack trace after their fatal error.
    fatal = [line for line in lines if line.startswith(("F0", "F1", "Fatal"))]
    return ": ".join([f"the compiling process died by {how}", *(fatal or lines)[-1:]])
