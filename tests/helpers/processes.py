"""Several JAX processes on this machine, which run a test's functions together."""

import multiprocessing
import os
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
        self._connections: list[Connection] = []
        self._processes, self._logs = [], []
        for index in range(count):
            here, there = spawn.Pipe()
            log = folder / f"{port}-{index}.log"
            process = spawn.Process(
                target=_work, args=(there, index, count, devices, port, str(log))
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
            self._logs.append(log)

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
        self._processes[index].join(timeout)
        return self._processes[index].exitcode

    def kill(self) -> None:
        """Kills all that still live."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        for connection in self._connections:
            connection.close()  # which tells its process to end
        if kind is None:
            deadline = time.monotonic() + 15
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self.kill()


def _work(
    connection: Connection, index: int, count: int, devices: int, port: int, log: str
) -> None:
    """What a process does: one call after the other."""
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
