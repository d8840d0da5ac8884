"""Copies on their way between hosts: TCP connections from one process to another.

Each process listens. Others, which prove that they know the job's secret, send it
copies to keep, or ask it for pieces; bytes follow in one direction or the other.
"""

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jshard.storage.checkpoint.local import copy_files
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.checkpoint.local.pieces import Piece
from jshard.system.compat import coordination
from jshard.system.jobs.job import LOOPBACK, listen
from jshard.system.jobs.peers import Peers, print_line
from jshard.system.network.authenticated import (
    Caller,
    Connection,
    Stranger,
    Strangers,
    call,
)

_PATIENCE = 60.0  # seconds without a byte
_BLOCK = 1 << 20  # bytes
_MOST_CALLERS = 256  # that have not proved themselves; more replace the oldest
_PURPOSE = "copies"


class Exchange:
    """The connections of one process; it listens until its process ends.

    Args:
      peers: All processes; each calls this.
      folder: Where copies are.
      secret: The job's.
    """

    def __init__(self, peers: Peers, folder: Path, secret: bytes):
        self._secret = secret
        host = coordination.address_of_process(peers.index)
        # Process 0 goes by the coordinator's name, which need not be an address here.
        bound = host if peers.index or host in LOOPBACK else ""
        where = f"process {peers.index}'s door for local copies"
        server = _Server(bound, folder, secret, Strangers(print_line, where))
        told = json.dumps([host, server.socket.getsockname()[1]])
        addresses = peers.share("local copies' addresses", told)
        self._addresses = [tuple(json.loads(text)) for text in addresses]

    def send(self, to: int, label: Label, folder: Path) -> None:
        """Sends a copy to another process, which keeps it.

        Raises:
          OSError: It cannot be reached, or cannot keep it.
        """
        with self._ask(to, keep=label.text()) as connection:
            with copy_files.open_bytes(folder, label.owner, label.step) as file:
                _send(connection, file, 0, label.size)
            answer = connection.receive()
        if answer != {"problem": ""}:
            raise OSError(answer.get("problem") or "the connection broke")

    def label(self, holder: int, owner: int, step: int) -> Label:
        """Returns the label of a copy that another process has.

        Raises:
          OSError: It cannot be reached, or does not have it.
        """
        with self._ask(holder, owner=owner, step=step) as connection:
            text = connection.receive().get("label", "")
        try:
            return Label.read(text)
        except ValueError as error:
            raise OSError(f"process {holder} has no such copy") from error

    def fetch(
        self, holder: int, owner: int, step: int, pieces: Sequence[Piece]
    ) -> Iterator[np.ndarray]:
        """Yields pieces of a copy that another process has, in order.

        Raises:
          OSError: It cannot be reached, or does not have them.
        """
        ranges = [[piece.start, piece.size] for piece in pieces]
        with self._ask(holder, owner=owner, step=step, ranges=ranges) as connection:
            for piece in pieces:
                data = np.empty(piece.size, np.uint8)
                for block in _blocks(data):
                    connection.receive_bytes(block)
                yield data

    def _ask(self, process: int, **request: Any) -> Connection:
        connection = call(self._addresses[process], _PURPOSE, self._secret)
        connection.settimeout(_PATIENCE)
        connection.send(**request)
        return connection


def _blocks(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the parts of an array that are signed, each of them."""
    for start in range(0, data.size, _BLOCK):
        yield data[start : start + _BLOCK]


def _send(connection: Connection, file: BinaryIO, start: int, size: int) -> None:
    """Sends a part of a file as `_blocks` receives it."""
    for at in range(start, start + size, _BLOCK):
        count = min(_BLOCK, start + size - at)
        data = os.pread(file.fileno(), count, at)
        if len(data) < count:
            raise OSError("the copy is too short")
        connection.send_bytes(data)


class _Server(socketserver.ThreadingTCPServer):
    """Answers the other processes, in threads."""

    daemon_threads = True

    def __init__(self, host: str, folder: Path, secret: bytes, strangers: Strangers):
        super().__init__((host, 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(host, 0)
        self.folder, self.secret, self.strangers = folder, secret, strangers
        self._callers: list[socket.socket] = []  # the oldest first
        name = "jshard-local-copies"
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever asked finds the connection closed, and says why."""

    def admit(self, connection: socket.socket, address: Any) -> Connection:
        """Waits until a caller has proved itself; raises Stranger if it does not."""
        caller = Caller(connection, address, _PURPOSE, self.secret)
        self._callers.append(connection)
        if len(self._callers) > _MOST_CALLERS:
            with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
                self._callers[0].shutdown(socket.SHUT_RDWR)
        try:
            return caller.wait()[0]
        except Stranger as why:
            self.strangers.name(caller.address, why)
            raise
        finally:
            self._callers.remove(connection)


class _Request(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        folder = self.server.folder
        with self.server.admit(self.request, self.client_address) as connection:
            connection.settimeout(_PATIENCE)
            asked = connection.receive()
            if "keep" in asked:
                problem = ""
                try:
                    self._keep(connection, Label.read(asked["keep"]), folder)
                except OSError as error:
                    problem = error.strerror or str(error)
                connection.send(problem=problem)
                connection.drain()
            elif "ranges" in asked:
                owner, step = asked["owner"], asked["step"]
                with copy_files.open_bytes(folder, owner, step) as file:
                    for start, size in asked["ranges"]:
                        _send(connection, file, start, size)
            elif asked:
                for label in copy_files.labels(folder):
                    if (label.owner, label.step) == (asked["owner"], asked["step"]):
                        connection.send(label=label.text())

    def _keep(self, connection: Connection, label: Label, folder: Path) -> None:
        with copy_files.create(folder, label.owner, label.step, label.size) as file:
            for start in range(0, label.size, _BLOCK):
                data = np.empty(min(_BLOCK, label.size - start), np.uint8)
                connection.receive_bytes(data)
                copy_files.write(file, start, data)
        copy_files.seal(folder, label)
