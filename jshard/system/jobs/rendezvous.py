"""Gathers a job's processes before JAX connects them.

JAX waits five minutes for a process that ends before it has connected, and 76 seconds
for one that ends right after. It connects processes that were started for jobs of
different sizes. So all first meet process 0 on the coordinator's port, which is free
until JAX listens there. Their connections stay until the heartbeats have begun: one
that closes before that tells at once that its process has ended.

All prove that they know the job's secret. Without one, whoever knows jshard can come.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.heartbeat import format_processes
from jshard.system.jobs.peers import print_line
from jshard.system.jobs.status import report
from jshard.system.network.authenticated import (
    Caller,
    Connection,
    Stranger,
    Strangers,
    call,
)

PATIENCE = 300.0  # seconds for all processes to come, as in JAX
ANSWER = 5.0  # seconds more for process 0 to say that they have not
RETRY = 0.1  # seconds between attempts to connect
NAMED = 5.0  # seconds until a host without an address is named
LONGEST = 4096  # bytes of a message
MOST_CALLERS = 256  # that have not proved themselves; more replace the oldest
PURPOSE = "meeting"
_ENDED = "ended while the job was starting (killed, or an error of its own)"


@contextlib.contextmanager
def gathered(
    cluster: Cluster, listener: socket.socket | None, secret: bytes
) -> Iterator[None]:
    """Waits until all processes are there; within it, all end with one that ends.

    Args:
      cluster: The job. If JAX is to find its coordinator, nothing is waited for.
      listener: What listens on the coordinator's port, in process 0; closed before the
        block begins.
      secret: The job's; empty if it has none.

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
            others = _Meeting(listener, cluster, secret).gather()
        if cluster.socket is not None:
            os.unlink(cluster.socket)
        _send(others.values(), code=None)
        _watch(_watch_others, others, joined)
        yield
        joined.set()
    else:
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_meet(cluster, secret))
            _wait(connection, cluster.process_id)
            undo.pop_all()
        _watch(_watch_first, connection, cluster.process_id, joined)
        yield
        joined.set()
        _send([connection], joined=True)


def _watch(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


# In process 0.


class _Meeting:
    """The other processes, as they come.

    Args:
      listener: What they connect to.
      cluster: The job.
      secret: The job's.
    """

    def __init__(self, listener: socket.socket, cluster: Cluster, secret: bytes):
        self._listener, self._secret = listener, secret
        self._count = cluster.num_processes
        self._found: dict[int, Connection] = {}  # by rank
        self._callers: list[Caller] = []  # those without a rank yet, the oldest first
        self._strangers = Strangers(
            print_line, f"the job's door, {cluster.coordinator}"
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def gather(self) -> dict[int, Connection]:
        """Returns the connections of the other processes, by rank, once all are there.

        Raises:
          UserError: One was started with another number of processes, or has the rank
            of another.
          RunFailed: One has ended, or not come in time.
        """
        deadline = time.monotonic() + PATIENCE
        with self._selector:
            while len(self._found) < self._count - 1:
                now = time.monotonic()
                if now > deadline:
                    missing = set(range(1, self._count)) - set(self._found)
                    who = format_processes(missing)
                    self._refuse(RunFailed(f"{who} did not start in {PATIENCE:g} s"))
                soonest = min([deadline, *(x.deadline for x in self._callers[:1])])
                for key, _ in self._selector.select(max(0.0, soonest - now)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, Connection):  # it says nothing more
                        who = format_processes([key.data])
                        self._refuse(RunFailed(f"{who} {_ENDED}"))
                    else:
                        assert isinstance(key.fileobj, Caller)
                        if key.fileobj in self._callers:  # not turned away meanwhile
                            self._hear(key.fileobj)
                while self._callers and self._callers[0].deadline <= time.monotonic():
                    self._turn_away(self._callers[0], self._callers[0].silent)
        for caller in self._callers:
            caller.close()
        return self._found

    def _accept(self) -> None:
        with contextlib.suppress(ConnectionError):  # it has left
            connection, address = self._listener.accept()
            caller = Caller(connection, address, PURPOSE, self._secret)
            self._selector.register(caller, selectors.EVENT_READ)
            self._callers.append(caller)
        if len(self._callers) > MOST_CALLERS:
            self._turn_away(self._callers[0], "was one of many that proved nothing")

    def _turn_away(self, caller: Caller, why: Stranger | str) -> None:
        self._strangers.name(caller.address, why)
        self._callers.remove(caller)
        self._selector.unregister(caller)
        caller.close()

    def _hear(self, caller: Caller) -> None:
        """Reads a caller's first message, which says who it is."""
        try:
            heard = caller.hear()
        except Stranger as why:
            self._turn_away(caller, why)
            return
        if heard is None:
            return  # more comes
        connection, told = heard
        index, size = told.get("process"), told.get("processes")
        if not isinstance(index, int) or not isinstance(size, int):
            self._turn_away(caller, "is no process of jshard")
            return
        self._callers.remove(caller)
        self._selector.unregister(caller)
        if size != self._count:
            why = (
                f"process {index} was started with --num_processes={size}, and process "
                f"0 with --num_processes={self._count}: give all the same"
            )
            self._refuse(UserError(why), index, connection)
        if index in self._found or not 0 < index < self._count:
            why = f"several processes were started with --process_id={index}"
            self._refuse(UserError(why), index, connection)
        self._found[index] = connection
        self._selector.register(connection, selectors.EVENT_READ, index)

    def _refuse(
        self, error: UserError | RunFailed, culprit: int = 0, *more: Connection
    ) -> NoReturn:
        """Ends all processes; `culprit` reports why, too."""
        code = 2 if isinstance(error, UserError) else 1
        connections = [*self._found.values(), *more]
        _send(connections, code=code, culprit=culprit, why=str(error))
        for connection in [*connections, *self._callers]:
            connection.close()
        raise error


def _watch_others(others: dict[int, Connection], joined: threading.Event) -> None:
    """Ends the job if a process ends before it has joined."""
    with selectors.DefaultSelector() as selector:
        for index, connection in others.items():
            selector.register(connection, selectors.EVENT_READ, index)
        while others:
            for key, _ in selector.select():
                connection = others.pop(key.data)
                if not _hear(connection) and not joined.is_set():
                    print_line(f"error: {format_processes([key.data])} {_ENDED}")
                    _send(others.values(), code=1, culprit=0)
                    _end(1)
                selector.unregister(connection)
                connection.close()


# In the others.


def _meet(cluster: Cluster, secret: bytes) -> Connection:
    """Returns a connection to process 0, once it is there and has answered."""
    assert cluster.coordinator is not None
    host, _, port = cluster.coordinator.rpartition(":")
    address = cluster.socket or (host.strip("[]"), int(port))
    me = {"process": cluster.process_id, "processes": cluster.num_processes}
    strangers = Strangers(print_line, f"process {cluster.process_id}")
    deadline = time.monotonic() + PATIENCE
    tell = time.monotonic() + NAMED
    while time.monotonic() < deadline:
        try:
            return call(address, PURPOSE, secret, **me)
        except Stranger as why:  # as may another job's, which ends
            strangers.name(f"from {cluster.coordinator}", why)
        except OSError as error:  # nobody listens yet, or another program
            unknown = isinstance(error, socket.gaierror)  # as is a pod's name at first
            if unknown and time.monotonic() > tell:
                tell = deadline
                print_line(
                    f"process {cluster.process_id} waits for process 0: this machine "
                    f"knows no address of {host} ({error.strerror}); if that stays so, "
                    "give another --coordinator=HOST:PORT"
                )
        time.sleep(RETRY)
    raise RunFailed(
        f"process 0 did not start in {PATIENCE:g} s, cannot be reached at "
        f"{cluster.coordinator}, has another secret, or its job has begun without this "
        "process"
    )


def _wait(connection: Connection, index: int) -> None:
    """Waits until process 0 says that all are there."""
    connection.settimeout(PATIENCE + ANSWER)
    told = _hear(connection)
    connection.settimeout(None)
    if "code" not in told:
        raise RunFailed(f"process 0, which coordinates, {_ENDED}")
    if told["code"] is None:
        return
    if told["culprit"] == index:
        raise UserError(told["why"])
    report(ending=told["code"])
    sys.exit(told["code"])


def _watch_first(connection: Connection, index: int, joined: threading.Event) -> None:
    """Ends this process if process 0 ends, or says so, before this one has joined."""
    with connection:
        told = _hear(connection)
    if joined.is_set():
        return
    if "code" not in told:
        print_line(f"process {index}: error: process 0, which coordinates, {_ENDED}")
    _end(told.get("code", 1))


# Both.


def _send(connections: Iterable[Connection], **values: Any) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended
            connection.send(**values)


def _hear(connection: Connection) -> dict[str, Any]:
    """Returns the next message; nothing if the other side has ended."""
    try:
        return connection.receive(LONGEST)
    except OSError:
        return {}


def _end(code: int) -> NoReturn:
    """Ends this process, whose main thread is within JAX."""
    report(ending=code)
    sys.stdout.flush()
    os._exit(code)
