"""Connections whose ends prove to each other that they know the job's secret.

Who listens greets every caller with a nonce, ``jshard 1 NONCE``. The caller answers
with a nonce of its own and its first message, and gets an empty one: the welcome. Each
message has a MAC: HMAC-SHA256 under a key that is the HMAC, under the secret, of both
nonces and what the connection is for. It covers the message, its direction and its
number. So nothing can be forged, replayed, reflected, dropped or used elsewhere; a
stranger between the two can read it, as it is not encrypted.

What a stranger can send is short, and must have come within `PATIENCE`.
"""

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Self

PATIENCE = 5.0  # seconds for the other end to prove itself
LONGEST = 400  # bytes of a caller's first message, with what proves it
MOST_NAMED = 20  # strangers
_GREETING = b"jshard 1 "
_NONCE, _MAC = 32, 32  # bytes, of which a line has the hexadecimal digits


class Stranger(ConnectionError):
    """The other end did not prove that it knows the secret; it says what it did."""


class Connection:
    """A connection of which both ends, or whoever caught its messages, know the secret.

    A context manager, which closes it.

    Args:
      connection: The socket.
      key: That both ends derived.
      calls: Whether this end is the caller.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, calls: bool):
        self._socket, self._key = connection, key
        self._file = connection.makefile("rb")
        self._here, self._there = (b"caller", b"listener")[:: 1 if calls else -1]
        self._sent = self._received = 0

    def send(self, **values: Any) -> None:
        """Sends values that JSON can express. Raises OSError if the other has ended."""
        self._socket.sendall(self._signed(json.dumps(values).encode()))

    def receive(self, most: int = -1) -> dict[str, Any]:
        """Returns the next values; nothing if the other end has ended.

        Args:
          most: Bytes to read; by default as many as are sent.

        Raises:
          Stranger: Somebody else sent something.
        """
        try:
            line = self._file.readline(most)
        except ConnectionResetError:
            return {}
        return self._opened(line) if line else {}

    def send_bytes(self, data: Any) -> None:
        """Sends bytes, of which the other end knows the number."""
        self._socket.sendall(data)
        self._socket.sendall(self._mac(self._here, self._sent, data))
        self._sent += 1

    def receive_bytes(self, into: Any) -> None:
        """Fills a buffer with the bytes of one `send_bytes`.

        Raises:
          OSError: The other end has ended, or somebody else sent something.
        """
        if self._file.readinto(into) < len(into):
            raise ConnectionError("the connection broke")
        mac = self._mac(self._there, self._received, into)
        if not hmac.compare_digest(mac, self._file.read(_MAC)):
            raise Stranger("sent what the job's secret does not sign")
        self._received += 1

    def drain(self) -> None:
        """Reads what comes until the other end closes, which else loses the answer."""
        with contextlib.suppress(OSError):
            while self._file.read(1 << 16):
                pass

    def settimeout(self, seconds: float | None) -> None:
        """Sets how long to wait for a byte."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        """Returns the socket's, for selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes it; the other end hears that."""
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _mac(self, sender: bytes, number: int, data: Any) -> bytes:
        made = hmac.new(self._key, b"%s %d " % (sender, number), "sha256")
        made.update(data)
        return made.digest()

    def _signed(self, data: bytes) -> bytes:
        mac = self._mac(self._here, self._sent, data).hex().encode()
        self._sent += 1
        return b"%s %s\n" % (mac, data)

    def _opened(self, line: bytes) -> dict[str, Any]:
        mac, _, data = line.removesuffix(b"\n").partition(b" ")
        right = self._mac(self._there, self._received, data).hex().encode()
        if not hmac.compare_digest(mac, right):
            raise Stranger("does not know the job's secret")
        self._received += 1
        with contextlib.suppress(ValueError):  # if there is no secret, anyone can sign
            values = json.loads(data)
            if isinstance(values, dict):
                return values
        raise Stranger("is no process of jshard")


class Caller:
    """Who has connected to a listener and not proved itself yet.

    Args:
      connection: The socket; closed unless `hear` returns it.
      address: The caller's, for the user.
      purpose: What the listener is for.
      secret: The job's.
    """

    def __init__(
        self, connection: socket.socket, address: Any, purpose: str, secret: bytes
    ):
        host = address[0] if isinstance(address, tuple) else "this machine"
        self.address = host.removeprefix("::ffff:")
        self.deadline = time.monotonic() + PATIENCE
        self._socket, self._purpose, self._secret = connection, purpose, secret
        self._nonce, self._text = secrets.token_hex(_NONCE).encode(), b""
        connection.setblocking(False)
        # Into the buffer of a new connection, or nobody is there.
        with contextlib.suppress(OSError):
            connection.send(_GREETING + self._nonce + b"\n")

    def hear(self) -> tuple[Connection, dict[str, Any]] | None:
        """Reads what has come; returns the connection and the first message, if all.

        Raises:
          Stranger: It is none of the job.
        """
        try:
            data = self._socket.recv(LONGEST)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            data = b""
        if not data:
            raise Stranger("left without a proof that it knows the job's secret")
        self._text += data
        if not self._text.endswith(b"\n") and len(self._text) <= LONGEST:
            return None
        nonce, _, line = self._text.partition(b" ")
        if len(nonce) != 2 * _NONCE or len(self._text) > LONGEST:
            raise Stranger("is no process of jshard")
        self._socket.setblocking(True)
        key = _key(self._secret, self._purpose, self._nonce, nonce)
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(Connection(self._socket, key, calls=False))
            values = connection._opened(line)
            undo.pop_all()
        with contextlib.suppress(OSError):  # it has ended, which is heard next
            connection.send()
        return connection, values

    def wait(self) -> tuple[Connection, dict[str, Any]]:
        """Waits for the first message; otherwise like `hear`."""
        while (rest := self.deadline - time.monotonic()) > 0:
            self._socket.settimeout(rest)
            if heard := self.hear():
                return heard
        raise Stranger(self.silent)

    @property
    def silent(self) -> str:
        """What it did when its time is over."""
        return f"did not prove in {PATIENCE:g} s that it knows the job's secret"

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def fileno(self) -> int:
        """Returns the socket's, for selectors."""
        return self._socket.fileno()


def call(
    address: tuple[str, int] | str, purpose: str, secret: bytes, **first: Any
) -> Connection:
    """Connects to a listener of the job, and returns when both are proved.

    Args:
      address: Host and port, or the path of a socket.
      purpose: What the listener is for.
      secret: The job's.
      **first: The first message.

    Raises:
      Stranger: Another of jshard's listeners answers, which has another secret.
      OSError: Nobody answers, or another program.
    """
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as undo:
        opened = undo.enter_context(_connect(address))
        greeting = _exactly(opened, len(_GREETING) + 2 * _NONCE + 1, deadline)
        theirs = greeting.removeprefix(_GREETING).removesuffix(b"\n")
        if len(theirs) != 2 * _NONCE:
            raise ConnectionError("another program")
        nonce = secrets.token_hex(_NONCE).encode()
        key = _key(secret, purpose, theirs, nonce)
        connection = undo.enter_context(Connection(opened, key, calls=True))
        first_line = connection._signed(json.dumps(first).encode())
        opened.sendall(nonce + b" " + first_line)
        try:
            welcome = _exactly(opened, 2 * _MAC + len(b" {}\n"), deadline)
        except ConnectionError as error:
            raise Stranger("has another secret, or its job has begun") from error
        connection._opened(welcome)
        undo.pop_all()
        return connection


class Strangers:
    """Names each stranger once.

    Args:
      say: Tells the user a line, from any thread.
      where: What they came to.
    """

    def __init__(self, say: Callable[[str], None], where: str):
        self._say, self._where = say, where
        self._named: set[str] = set()

    def name(self, address: str, why: Stranger | str) -> None:
        """Names a stranger, if it is new."""
        if address in self._named or len(self._named) > MOST_NAMED:
            return
        self._named.add(address)
        more = "; more are not named" if len(self._named) > MOST_NAMED else ""
        self._say(f"{self._where}: turned away {address}, which {why}{more}")


def _key(secret: bytes, purpose: str, listener: bytes, caller: bytes) -> bytes:
    parts = b"jshard 1 %s %s %s" % (purpose.encode(), listener, caller)
    return hmac.digest(secret, parts, "sha256")


def _connect(address: tuple[str, int] | str) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, PATIENCE)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(PATIENCE)
        connection.connect(address)
        undo.pop_all()
        return connection


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Returns so many bytes, and no more; raises OSError if they come too late."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection broke")
        data += more
    return data
