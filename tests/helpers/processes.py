"""Several JAX processes on this machine, which run a test's functions together."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

import jax


class Processes:
    """Processes that form one JAX job; a context manager, which leaves none behind.

    Args:
      count: how many.
      devices: CPU devices of each.
      folder: for what they print, a file each.
    """

    def __init__(self, count: int, devices: int, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(count)]
        self._connections = [here for here, _ in pairs]
        theirs = [there for _, there in pairs]
        self._told, tell = spawn.Pipe(duplex=False)
        self._logs = [folder / f"{port}-{index}.log" for index in range(count)]
        self._parent = spawn.Process(
            target=_fork, args=(theirs, tell, devices, port, self._logs)
        )
        self._parent.start()
        for connection in (*theirs, tell):
            connection.close()
        self._ids: list[int] = self._told.recv()
        self._codes: dict[int, int] = {}

    def call(
        self, function: Callable, *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[Any]:
        """Runs a function of a test module on all processes; returns what each did.

        All are killed where one raises, dies, or takes longer than ``timeout``.
        """
        self.start(function, *args, **kwargs)
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = {
                i: c for i, c in enumerate(self._connections) if i not in results
            }
            # Whoever is first: the others may wait for one that has failed.
            ready = wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            for number, connection in waiting.items():
                if connection in ready:
                    results[number] = self._receive(number, connection)
            if not ready:
                self._fail(f"{sorted(waiting)} not done in {timeout} s")
        return [results[number] for number in sorted(results)]

    def _receive(self, number: int, connection: Connection) -> Any:
        try:
            well, result = connection.recv()
        except (EOFError, OSError):
            well, result = False, "it died"
        return result if well else self._fail(f"process {number}: {result}")

    def _fail(self, why: str) -> NoReturn:
        self.kill()
        printed = [log.read_text(errors="replace")[-4000:] for log in self._logs]
        raise AssertionError("\n----\n".join([why, *printed]))

    def start(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        """Starts a call that some will not survive: ``wait_for`` is next."""
        for connection in self._connections:
            connection.send((function, args, kwargs))

    def wait_for(self, index: int, timeout: float) -> int | None:
        """Waits for a process to end; returns its exit code, None if it lives on."""
        deadline = time.monotonic() + timeout
        while index not in self._codes:
            if not self._told.poll(max(0.0, deadline - time.monotonic())):
                return None
            ended, code = self._told.recv()
            self._codes[ended] = code
        return self._codes[index]

    def kill(self) -> None:
        """Kills all that still live."""
        if self._parent.is_alive():
            for number in self._ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        self._parent.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        for connection in self._connections:
            connection.close()  # which tells its process to end
        if kind is None:
            self._parent.join(15)
        self.kill()


def _fork(
    theirs: list[Connection],
    tell: Connection,
    devices: int,
    port: int,
    logs: list[Path],
) -> None:
    """Imports once what takes long, starts the processes, and tells how they end."""
    import pytest  # noqa: F401

    from jshard.storage.checkpoint import checkpointer  # noqa: F401

    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # as in this project's conftest.py
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_work, args=(theirs, tell, index, devices, port, log))
        for index, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for connection in theirs:
        connection.close()
    tell.send([process.pid for process in processes])
    living = {*range(len(processes))}
    while living:
        wait([processes[index].sentinel for index in living])
        for index in [i for i in living if processes[i].exitcode is not None]:
            living.remove(index)
            tell.send((index, processes[index].exitcode))


def _work(
    theirs: list[Connection],
    tell: Connection,
    index: int,
    devices: int,
    port: int,
    log: Path,
) -> None:
    """What a process does: one call after the other."""
    count, connection = len(theirs), theirs[index]
    for other in (tell, *theirs):
        if other is not connection:
            other.close()  # who waits at its other end shall see its process end
    with open(log, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)  # they compile faster
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            break
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
    if count > 1:
        # Before Python waits for threads, one of which may wait for another process.
        jax.distributed.shutdown()
