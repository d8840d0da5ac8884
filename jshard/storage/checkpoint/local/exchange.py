"""Copies on their way between hosts: TCP connections from one process to another.

Each process listens. Others send it copies to keep, or ask it for pieces. A request is
two lines, the job's token and JSON; bytes follow in one direction or the other.
"""

import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard.storage.checkpoint.local import copy_files
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.checkpoint.local.pieces import Piece
from jshard.system.compat import coordination
from jshard.system.jobs.job import LOOPBACK, listen
from jshard.system.jobs.peers import Peers

_PATIENCE = 60.0  # seconds without a byte
_LONGEST_TOKEN = 100
_BLOCK = 1 << 20  # bytes


class Exchange:
    """The connections of one process; it listens until its process ends.

    Args:
      peers: All processes; each calls this.
      folder: Where copies are.
    """

    def __init__(self, peers: Peers, folder: Path):
        self._token = peers.publish("local copies' token", secrets.token_hex(16))
        host = coordination.address_of_process(peers.index)
        # Process 0 goes by the coordinator's name, which need not be an address here.
        bound = host if peers.index or host in LOOPBACK else ""
        server = _Server(bound, folder, self._token)
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
                if label.size:
                    connection.sendfile(file, 0, label.size)
            problem = connection.makefile("rb").readline()
        if problem != b"\n":
            raise OSError(problem.decode().strip() or "the connection broke")

    def label(self, holder: int, owner: int, step: int) -> Label:
        """Returns the label of a copy that another process has.

        Raises:
          OSError: It cannot be reached, or does not have it.
        """
        with self._ask(holder, owner=owner, step=step) as connection:
            text = connection.makefile("rb").readline()
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
                _receive(connection.recv_into, data)
                yield data

    def _ask(self, process: int, **request: Any) -> socket.socket:
        connection = socket.create_connection(self._addresses[process], _PATIENCE)
        connection.sendall(f"{self._token}\n{json.dumps(request)}\n".encode())
        return connection


def _receive(into: Callable[[memoryview], int], data: np.ndarray) -> None:
    """Fills an array with the bytes of a connection."""
    rest = data.data
    while rest:
        count = into(rest)
        if not count:
            raise OSError("the connection broke")
        rest = rest[count:]


class _Server(socketserver.ThreadingTCPServer):
    """Answers the other processes, in threads."""

    daemon_threads = True

    def __init__(self, host: str, folder: Path, token: str):
        super().__init__((host, 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(host, 0)
        self.folder, self.token = folder, token
        name = "jshard-local-copies"
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever asked finds the connection closed, and says why."""


class _Request(socketserver.StreamRequestHandler):
    timeout = _PATIENCE

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        token = self.rfile.readline(_LONGEST_TOKEN).strip().decode()
        if not hmac.compare_digest(token, self.server.token):
            return  # a stranger
        asked, folder = json.loads(self.rfile.readline()), self.server.folder
        if "keep" in asked:
            problem = ""
            try:
                self._keep(Label.read(asked["keep"]), folder)
            except OSError as error:
                problem = error.strerror or str(error)
            self.wfile.write(problem.encode() + b"\n")
        elif "ranges" in asked:
            with copy_files.open_bytes(folder, asked["owner"], asked["step"]) as file:
                for start, size in asked["ranges"]:
                    if size:
                        self.connection.sendfile(file, start, size)
        else:
            found = copy_files.labels(folder)
            for label in found:
                if (label.owner, label.step) == (asked["owner"], asked["step"]):
                    self.wfile.write(label.text().encode() + b"\n")

    def _keep(self, label: Label, folder: Path) -> None:
        with copy_files.create(folder, label.owner, label.step, label.size) as file:
            for start in range(0, label.size, _BLOCK):
                data = np.empty(min(_BLOCK, label.size - start), np.uint8)
                _receive(self.rfile.readinto, data)
                copy_files.write(file, start, data)
        copy_files.seal(folder, label)
