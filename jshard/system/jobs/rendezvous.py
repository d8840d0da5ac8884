"""Gathers a job's processes before JAX connects them.

JAX waits five minutes for a process that ends before it has connected, and 76 seconds
for one that ends right after. It connects processes that were started for jobs of
different sizes. So all first meet process 0 on the coordinator's port, which is free
until JAX listens there. Their connections stay until the heartbeats have begun: one
that closes before that tells at once that its process has ended.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NoReturn

from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.heartbeat import format_processes
from jshard.system.jobs.peers import print_line
from jshard.system.jobs.status import report

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
        with listener:
            others = _Meeting(listener, cluster.num_processes).gather()
        _send(others.values(), code=None)
        _watch(_watch_others, others, joined)
        yield
        joined.set()
    else:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_meet(cluster))
            lines = undo.enter_context(connection.makefile("rb"))
            _wait(connection, lines, cluster.process_id)
            undo.pop_all()
        _watch(_watch_first, connection, lines, cluster.process_id, joined)
        yield
        joined.set()
        with contextlib.suppress(OSError):  # process 0 may have ended meanwhile
            connection.sendall(JOINED)


def _watch(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


# In process 0.


class _Meeting:
    """The other processes, as they come.

    Args:
      listener: What they connect to.
      count: How many processes the job has, this one included.
    """

    def __init__(self, listener: socket.socket, count: int):
        self._listener, self._count = listener, count
        self._found: dict[int, socket.socket] = {}  # by rank
        self._texts: dict[socket.socket, bytes] = {}  # of those without a rank yet
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def gather(self) -> dict[int, socket.socket]:
        """Returns the connections of the other processes, by rank, once all are there.

        Raises:
          UserError: One was started with another number of processes, or has the rank
            of another.
          RunFailed: One has ended, or not come in time.
        """
        deadline = time.monotonic() + PATIENCE
        with self._selector:
            while len(self._found) < self._count - 1:
                ready = self._selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = set(range(1, self._count)) - set(self._found)
                    who = format_processes(missing)
                    self._refuse(RunFailed(f"{who} did not start in {PATIENCE:g} s"))
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        self._selector.register(connection, selectors.EVENT_READ)
                        self._texts[connection] = b""
                    elif key.data is not None:  # it says nothing more
                        who = format_processes([key.data])
                        self._refuse(RunFailed(f"{who} {_ENDED}"))
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._hear(key.fileobj)
        for stranger in self._texts:
            stranger.close()
        return self._found

    def _hear(self, connection: socket.socket) -> None:
        """Reads a connection's first line, which says whose it is."""
        data = _receive(connection)
        text = self._texts[connection] + data
        self._texts[connection] = text
        if data and not text.endswith(b"\n") and len(text) < LONGEST:
            return  # more comes
        told = _read(text)
        index, size = told.get("process"), told.get("processes")
        if not isinstance(index, int) or not isinstance(size, int):  # a stranger
            self._selector.unregister(connection)
            self._texts.pop(connection)
            connection.close()
            return
        with contextlib.suppress(OSError):  # it has ended, which is heard next
            connection.sendall(WELCOME)
        if size != self._count:
            why = (
                f"process {index} was started with --num_processes={size}, and process "
                f"0 with --num_processes={self._count}: give all the same"
            )
            self._refuse(UserError(why), index)
        if index in self._found or not 0 < index < self._count:
            why = f"several processes were started with --process_id={index}"
            self._refuse(UserError(why), index)
        self._texts.pop(connection)
        self._found[index] = connection
        self._selector.modify(connection, selectors.EVENT_READ, index)

    def _refuse(self, error: UserError | RunFailed, culprit: int = 0) -> NoReturn:
        """Ends all processes; `culprit` reports why, too."""
        code = 2 if isinstance(error, UserError) else 1
        connections = [*self._found.values(), *self._texts]
        _send(connections, code=code, culprit=culprit, why=str(error))
        for connection in connections:
            connection.close()
        raise error


def _watch_others(others: dict[int, socket.socket], joined: threading.Event) -> None:
    """Ends the job if a process ends before it has joined."""
    with selectors.DefaultSelector() as selector:
        for index, connection in others.items():
            selector.register(connection, selectors.EVENT_READ, index)
        while others:
            for key, _ in selector.select():
                connection = others.pop(key.data)
                if not _receive(connection) and not joined.is_set():
                    print_line(f"error: {format_processes([key.data])} {_ENDED}")
                    _send(others.values(), code=1, culprit=0)
                    _end(1)
                selector.unregister(connection)
                connection.close()


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
                _send([connection], **me)
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


def _send(connections: Iterable[socket.socket], **values: Any) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended
            connection.sendall(json.dumps(values).encode() + b"\n")


def _receive(connection: socket.socket) -> bytes:
    """Returns what has come; nothing if the other side has ended."""
    try:
        return connection.recv(LONGEST)
    except OSError:
        return b""


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
