"""Several JAX processes on this machine, which run a test's functions together."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import jax

START = 60  # seconds, at most, until a process is there


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
        self.processes, self._logs = [], []
        for index in range(count):
            here, there = spawn.Pipe()
            log = folder / f"process-{index}-of-{count}-{port}.log"
            process = spawn.Process(
                target=_work, args=(there, index, count, devices, port, str(log))
            )
            process.start()
            there.close()
            self._connections.append(here)
            self.processes.append(process)
            self._logs.append(log)

    def call(
        self, function: Callable, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """Runs a function of a test module on every process; returns what each did.

        All are killed where one raises, dies, or takes longer than ``timeout``.
        """
        self.start(function, *args, **kwargs)
        return self.results(timeout)

    def start(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        """Starts a call, whose end ``results`` or ``end`` waits for."""
        for connection in self._connections:
            connection.send((function, args, kwargs))

    def results(self, timeout: float = 60) -> list[Any]:
        """Waits for what ``start`` began."""
        deadline = time.monotonic() + timeout + START
        results = []
        for index, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"process {index} is not done")
                ok, result = connection.recv()
                if not ok:
                    raise AssertionError(f"process {index}: {result}")
            except (EOFError, OSError, AssertionError) as error:
                self.kill()
                raise AssertionError(f"{error!r}\n{self.printed()}") from error
            results.append(result)
        return results

    def end(self, timeout: float) -> list[int | None]:
        """Waits until all have died, then kills the rest; returns exit codes."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """Kills all that still live."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def printed(self) -> str:
        """What they have printed, the end of it."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}"
            for log in self._logs
            if log.exists()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        for connection in self._connections:
            connection.close()  # which tells a process to end
        if kind is None:
            self.end(timeout=15)
        self.kill()


def _work(
    connection: Connection, index: int, count: int, devices: int, port: int, log: str
) -> None:
    """What a process does: one call after the other."""
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
