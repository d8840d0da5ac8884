"""Gathers a job's processes before JAX connects them.

JAX waits five minutes for a process that ends before it has connected, and 76 seconds
for one that ends right after. It connects processes that were started for jobs of
different sizes. So all first meet process 0 on the coordinator's port, which is free
until JAX listens there. Their connections stay until the heartbeats have begun: one
that closes before that tells at once that its process has ended.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, NoReturn

from jshard.distributed.cluster import Cluster
from jshard.distributed.heartbeat import format_processes
from jshard.distributed.peers import print_line
from jshard.distributed.status import report
from jshard.errors import RunFailed, UserError

PATIENCE = 300.0  # seconds for all processes to come, as in JAX
ANSWER = 5.0  # seconds for process 0 to answer who has connected
RETRY = 0.1  # seconds between attempts to connect
LONGEST = 200  # bytes of a message
WELCOME, JOINED = b"jshard\n", b"joined\n"
_ENDED = "ended while the job was starting (killed, or an error of its own)"


@contextlib.contextmanager
def gathered(cluster: Cluster, listener: socket.socket | None) -> Iterator[None]:
    """Waits until all processes are there; within it, all end with one that ends.

    Args:
      cluster: The job. If JAX is to find its coordinator, nothing is waited for.
      listener: What listens on the coordinator's port, in process 0; closed before the
        block begins.

    Raises:
      UserError: Processes were started for jobs of different sizes, or with one rank.
      RunFailed: A process has ended, or not come in time.
      SystemExit: In the processes that are not to blame, which process 0 reports.
    """
    if cluster.coordinator is None:
        yield
        return
    joined = threading.Event()
    if cluster.process_id == 0:
        assert listener is not None
        _Meeting(listener, cluster.num_processes, joined).gathered.result()
        yield
        joined.set()
    else:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_meet(cluster))
            lines = undo.enter_context(connection.makefile("rb"))
            _wait(connection, lines, cluster.process_id)
            undo.pop_all()
        watched = (connection, lines, cluster.process_id, joined)
        threading.Thread(target=_watch_first, args=watched, daemon=True).start()
        yield
        joined.set()
        with contextlib.suppress(OSError):  # process 0 may have ended meanwhile
            connection.sendall(JOINED)


# In process 0.


class _Meeting:
    """The other processes as they come and, until this one has joined, as they end.

    They are waited for in a thread.

    Args:
      listener: What they connect to; closed when all are there.
      count: How many processes the job has, this one included.
      joined: Set when this process has joined.

    Attributes:
      gathered: Done when all are there; its exception, a UserError or RunFailed, says
        why they will never be.
    """

    def __init__(self, listener: socket.socket, count: int, joined: threading.Event):
        self.gathered: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._count, self._joined = count, joined
        self._found: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._strangers: set[asyncio.StreamWriter] = set()  # without a rank yet
        self._error: UserError | RunFailed | None = None
        self._decided, self._left = asyncio.Event(), asyncio.Event()
        run = [self._run(listener)]
        threading.Thread(target=asyncio.run, args=run, daemon=True).start()

    async def _run(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._meet, sock=listener, limit=LONGEST)
        try:
            await asyncio.wait_for(self._decided.wait(), PATIENCE)
        except TimeoutError:
            who = format_processes({*range(1, self._count)} - {*self._found})
            self._refuse(RunFailed(f"{who} did not start in {PATIENCE:g} s"))
        server.close()
        for stranger in self._strangers:
            stranger.close()
        if self._error is not None:
            self.gathered.set_exception(self._error)
            return
        for other in self._found.values():
            other.write(_message(code=None))
        self.gathered.set_result(None)
        await self._left.wait()

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves a connection until its end, or that of the meeting."""
        with contextlib.suppress(asyncio.CancelledError):  # a server would log it
            try:
                await self._hear(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Hears who has connected, and waits until it has joined."""
        self._strangers.add(writer)
        try:
            told = _read(await reader.readline())
        except (OSError, ValueError):  # ended, or a longer line
            told = {}
        index, size = told.get("process"), told.get("processes")
        if not isinstance(index, int) or not isinstance(size, int):
            self._strangers.discard(writer)
            return
        writer.write(WELCOME)
        if size != self._count:
            why = (
                f"process {index} was started with --num_processes={size}, and process "
                f"0 with --num_processes={self._count}: give all the same"
            )
            return self._refuse(UserError(why), index)
        if index in self._found or not 0 < index < self._count:
            why = f"several processes were started with --process_id={index}"
            return self._refuse(UserError(why), index)
        self._strangers.discard(writer)
        self._found[index] = writer
        if len(self._found) == self._count - 1:
            self._decided.set()
        try:
            has_joined = await reader.readline() == JOINED
        except OSError:
            has_joined = False
        del self._found[index]
        if not has_joined and not self._joined.is_set():
            self._lose(f"{format_processes([index])} {_ENDED}")
        if not self._found:
            self._left.set()

    def _lose(self, why: str) -> None:
        """Ends the job, because a process has ended."""
        if not self.gathered.done():
            return self._refuse(RunFailed(why))
        print_line(f"error: {why}")
        for other in self._found.values():
            other.write(_message(code=1, culprit=0))
        _end(1)

    def _refuse(self, error: UserError | RunFailed, culprit: int = 0) -> None:
        """Ends all processes; `culprit` reports why, too."""
        code = 2 if isinstance(error, UserError) else 1
        for writer in (*self._found.values(), *self._strangers):
            writer.write(_message(code=code, culprit=culprit, why=str(error)))
        self._error = error
        self._decided.set()


# In the others.


def _meet(cluster: Cluster) -> socket.socket:
    """Returns a connection to process 0, once it is there and has answered."""
    assert cluster.coordinator is not None
    host, _, port = cluster.coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    me = {"process": cluster.process_id, "processes": cluster.num_processes}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # nobody listens yet
            connection = socket.create_connection(address, ANSWER)
            with contextlib.ExitStack() as undo:
                undo.enter_context(connection)
                connection.sendall(_message(**me))
                # Another program's answer is none, as that of a job that has begun.
                if connection.recv(len(WELCOME)) == WELCOME:
                    undo.pop_all()
                    return connection
        time.sleep(RETRY)
    raise RunFailed(
        f"process 0 did not start in {PATIENCE:g} s, cannot be reached at "
        f"{cluster.coordinator}, or its job has begun without this process"
    )


def _wait(connection: socket.socket, lines: IO[bytes], index: int) -> None:
    """Waits until process 0 says that all are there."""
    connection.settimeout(PATIENCE + ANSWER)
    told = _read_line(lines)
    connection.settimeout(None)
    if "code" not in told:
        raise RunFailed(f"process 0, which coordinates, {_ENDED}")
    if told["code"] is None:
        return
    if told["culprit"] == index:
        raise UserError(told["why"])
    report(ending=told["code"])
    sys.exit(told["code"])


def _watch_first(
    connection: socket.socket, lines: IO[bytes], index: int, joined: threading.Event
) -> None:
    """Ends this process if process 0 ends, or says so, before this one has joined."""
    with connection, lines:
        told = _read_line(lines)
    if joined.is_set():
        return
    if "code" not in told:
        print_line(f"process {index}: error: process 0, which coordinates, {_ENDED}")
    _end(told.get("code", 1))


# Messages: JSON, a line each.


def _message(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _read_line(lines: IO[bytes]) -> dict[str, Any]:
    """Returns the next message; nothing if the other side has ended."""
    try:
        return _read(lines.readline())
    except OSError:
        return {}


def _read(line: bytes) -> dict[str, Any]:
    """Returns the values of a message; none if it is not one of jshard's."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _end(code: int) -> NoReturn:
    """Ends this process, whose main thread is within JAX."""
    report(ending=code)
    sys.stdout.flush()
    os._exit(code)
