"""Who cannot prove that it knows the job's secret is turned away, and named once."""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from test_starting import SECRET as RIGHT
from test_starting import Start, connect

from jshard.system.compat.coordination import check_mtls
from jshard.system.errors import UserError
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.job import _find_secret, join
from jshard.system.jobs.peers import Peers
from jshard.system.network import authenticated
from jshard.system.network.authenticated import (
    Caller,
    Connection,
    Stranger,
    Strangers,
    call,
)
from jshard.system.network.secret import SECRET, SECRET_FILE, given_secret, read_secret
from jshard.training.agreement import share_secret

Pair = tuple[Connection, Connection]


class Door:
    """A listener that admits one caller after the other, and what became of each."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.ends: list[Any] = []

    def admit(self, caller: Callable[[], Any]) -> Any:
        """Returns what the listener gets from what a caller does."""
        thread = threading.Thread(target=caller)
        thread.start()
        connection, address = self.listener.accept()
        try:
            return Caller(connection, address, "test", RIGHT).wait()
        except Stranger as why:
            connection.close()
            return str(why)
        finally:
            thread.join()


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    with found.listener:
        yield found


def pair(door: Door) -> Pair:
    """Both ends of a connection."""
    ends: list[Connection] = []
    admitted = door.admit(
        lambda: ends.append(call(door.address, "test", RIGHT, number=1))
    )
    assert admitted[1] == {"number": 1}
    return ends[0], admitted[0]


def test_who_knows_the_secret_is_let_in_and_messages_have_an_order(door):
    caller, listener = pair(door)
    with caller, listener:
        caller.send(number=2)
        listener.send(number=3)
        assert (listener.receive(), caller.receive()) == ({"number": 2}, {"number": 3})
        caller.send_bytes(b"1234")
        data = bytearray(4)
        listener.receive_bytes(data)
        assert data == b"1234"
        signed = caller._signed(b'{"number": 4}')
        caller._socket.sendall(signed * 2)  # the second is a replay
        assert listener.receive() == {"number": 4}
        with pytest.raises(Stranger, match="does not know"):
            listener.receive()
        listener._socket.sendall(listener._signed(b"{}")[:-2] + b"!\n")  # changed
        with pytest.raises(Stranger, match="does not know"):
            caller.receive()


def test_bytes_that_somebody_changed_are_refused(door):
    caller, listener = pair(door)
    with caller, listener:
        caller._socket.sendall(b"4321" + caller._mac(b"caller", 1, b"1234"))
        with pytest.raises(Stranger, match="does not sign"):
            listener.receive_bytes(bytearray(4))


def test_a_message_is_not_taken_back_as_the_other_ends(door):
    caller, listener = pair(door)
    with caller, listener:
        caller.send(code=1)
        line = listener._file.readline()
        listener._socket.sendall(line)
        with pytest.raises(Stranger, match="does not know"):
            caller.receive()


@pytest.mark.parametrize(
    ("purpose", "secret"), [("test", b"a wrong secret!!"), ("test", b""), ("b", RIGHT)]
)
def test_another_secret_or_purpose_is_turned_away_on_both_sides(door, purpose, secret):
    said = []

    def come() -> None:
        with pytest.raises(Stranger, match="has another secret"):
            call(door.address, purpose, secret)
        said.append(True)

    assert "does not know the job's secret" in door.admit(come)
    assert said == [True]


@pytest.mark.parametrize("welcome", [b"0" * 64 + b" {}\n", b"x" * 68, b"x"])
def test_a_listener_that_proves_nothing_is_not_believed(door, welcome):
    def pretend() -> None:
        connection, _ = door.listener.accept()
        with connection:
            connection.sendall(b"jshard 1 " + b"0" * 64 + b"\n")
            connection.recv(1000)
            connection.sendall(welcome)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Stranger, match=r"does not know|has another secret"):
        call(door.address, "test", RIGHT)
    thread.join()


def test_a_transcript_proves_nothing_the_second_time(door):
    heard: list[bytes] = []
    sendall = socket.socket.sendall

    class Recorded(socket.socket):
        def sendall(self, data: Any, *flags: int) -> None:
            heard.append(bytes(data))
            sendall(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authenticated.socket, "socket", Recorded)
        caller, listener = pair(door)
    caller.close()
    listener.close()
    first = heard[0]
    assert first.endswith(b'{"number": 1}\n')

    def replay() -> None:
        with socket.create_connection(door.address) as connection:
            connection.recv(100)
            connection.sendall(first)
            assert connection.recv(100) == b""

    assert "does not know the job's secret" in door.admit(replay)


def test_who_calls_back_what_the_listener_says_is_turned_away(door):
    def reflect() -> None:
        with socket.create_connection(door.address) as connection:
            greeting = connection.recv(100)
            nonce = greeting.split()[-1]
            connection.sendall(nonce + b" " + nonce + b" {}\n")
            assert connection.recv(100) == b""

    assert "does not know the job's secret" in door.admit(reflect)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"x" * 100_000, "is no process of jshard"),
        (b"GET / HTTP/1.1\r\n\r\n", "is no process of jshard"),
        (b"", "left without a proof"),
    ],
)
def test_other_programs_are_turned_away(door, text, why):
    def say() -> None:
        with socket.create_connection(door.address) as connection:
            connection.sendall(text)

    assert why in door.admit(say)


def test_a_silent_stranger_is_told_from_one_that_left(door, monkeypatch):
    monkeypatch.setattr(authenticated, "PATIENCE", 0.1)
    with socket.socket() as connection:
        said = door.admit(lambda: connection.connect(door.address))
    assert said == "did not prove in 0.1 s that it knows the job's secret"


def test_a_slow_stranger_has_a_deadline_for_all_it_says(door, monkeypatch):
    monkeypatch.setattr(authenticated, "PATIENCE", 0.3)

    def trickle() -> None:
        connection = socket.create_connection(door.address)
        with connection, contextlib.suppress(OSError):  # it is turned away
            for _ in range(100):
                connection.sendall(b"x")
                time.sleep(0.02)

    since = time.monotonic()
    assert "did not prove in 0.3 s" in door.admit(trickle)
    assert time.monotonic() - since < 1.5


def test_strangers_neither_hold_a_meeting_nor_join_it_and_are_named_once(
    monkeypatch, capfd
):
    monkeypatch.setattr(authenticated, "PATIENCE", 0.3)
    monkeypatch.setattr(
        "jshard.system.jobs.rendezvous.MOST_CALLERS", 3
    )  # the oldest goes
    start = Start((0, 2))
    silent = [connect(start) for _ in range(6)]
    forged = json.dumps({"process": 1, "processes": 3}).encode()
    with connect(start) as stranger:
        stranger.sendall(b"0" * 64 + b" " + b"0" * 64 + b" " + forged + b"\n")
        time.sleep(0.5)
    address = ("127.0.0.1", start.port)
    with call(address, "meeting", RIGHT, process=1, processes=2) as process:
        assert process.receive() == {"code": None}
        assert start.wait() == {0: None}
        process.send(joined=True)
    for connection in silent:
        connection.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert "the job's door, 127.0.0.1:" in line
    assert "turned away 127.0.0.1, which was one of many" in line


def test_a_flood_of_strangers_is_not_a_flood_of_lines():
    said: list[str] = []
    strangers = Strangers(said.append, "the door")
    for number in range(100):
        for _ in range(3):
            strangers.name(f"10.0.0.{number}", "did nothing")
    assert len(said) == authenticated.MOST_NAMED + 1
    assert said[-1].endswith("; more are not named")


# The secret.


@pytest.fixture(autouse=True)
def no_secret(monkeypatch) -> Iterator[None]:
    given_secret.cache_clear()
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv(SECRET_FILE, raising=False)
    yield
    given_secret.cache_clear()


def test_a_secret_of_the_environment_is_taken_out_of_it(monkeypatch):
    monkeypatch.setenv(SECRET, "0123456789abcdef")
    assert given_secret() == given_secret() == b"0123456789abcdef"
    assert SECRET not in os.environ


def test_a_secret_that_others_can_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv(SECRET_FILE, str(file))
    file.chmod(0o640)
    with pytest.raises(UserError, match=r"other users have access \(mode 640\)"):
        given_secret()
    file.chmod(0o600)
    assert given_secret() == b"0123456789abcdef"
    file.write_text("short-secret")
    with pytest.raises(UserError, match="16 to 4096 bytes, not 12") as refused:
        read_secret(file, "FILE")
    assert "short-secret" not in str(refused.value)
    for path, why in (("/dev/null", "is no file"), (tmp_path / "x", "cannot be read")):
        with pytest.raises(UserError, match=why):
            read_secret(Path(path), "FILE")
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    else:
        os.chown(file, 1, -1)
    with pytest.raises(UserError, match="belongs to another user"):
        read_secret(file, "FILE")


def test_a_job_of_several_hosts_without_a_secret_says_so_once(tmp_path, capfd):
    for index in range(2):
        open_job = Cluster(index, 2, "10.0.0.1:8476", None, "options")
        assert _find_secret(open_job) == b""
    (line,) = capfd.readouterr().err.splitlines()
    assert "can take a process's place" in line
    assert f"{SECRET_FILE}=FILE" in line
    for address in ("127.0.0.1:8476", None):
        assert _find_secret(Cluster(0, 2, address, None, "SLURM")) == b""
    assert capfd.readouterr().err == ""
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match=r"other users have access.*chmod 700"):
        _find_secret(Cluster(0, 2, f"unix:{tmp_path}/socket", None, "options"))


def test_certificates_that_this_jax_would_ignore_are_refused(monkeypatch):
    def without(coordinator_address: str) -> None: ...
    def with_it(coordinator_address: str, mtls_cert_file: str) -> None: ...

    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "certificate.pem")
    monkeypatch.setattr(jax.distributed, "initialize", without)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = "^JAX_MTLS_CERT_FILE: JAX .* has no mTLS"
        with pytest.raises(UserError, match=said):
            join(Cluster(0, 2, address, None, "options")).__enter__()
    monkeypatch.setattr(jax.distributed, "initialize", with_it)
    check_mtls()


class Two(Peers):
    """Two processes, which tell the same."""

    count = 2

    def share(self, name: str, text: str) -> list[str]:
        return [text, text]


def test_processes_that_were_given_none_share_a_secret_by_a_file(tmp_path):
    kept: list[int] = []

    class Watching(Two):
        def share(self, name: str, text: str) -> list[str]:
            if name == "secret written":
                (file,) = tmp_path.iterdir()
                kept.append(stat.S_IMODE(file.stat().st_mode))
            return super().share(name, text)

    assert len(share_secret(Watching(), tmp_path)) == 64
    assert kept == [0o600]
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_cannot_be_written_ends_all_processes(tmp_path):
    said = (
        f"process 0 cannot write .*: No such file or directory; .* {SECRET_FILE}=FILE"
    )
    with pytest.raises(UserError, match=said):
        share_secret(Two(), tmp_path / "missing")


def test_a_process_without_the_others_secret_is_named(tmp_path):
    class Other(Two):
        def share(self, name: str, text: str) -> list[str]:
            return ["given", text]

    with pytest.raises(UserError, match=r"^process 1 was given no secret, and others"):
        share_secret(Other(), tmp_path)


def test_a_process_that_cannot_read_the_secret_ends_all(tmp_path):
    class Blind(Two):
        def share(self, name: str, text: str) -> list[str]:
            return [text, "no such file" if name == "secret read" else text]

    said = f"process 1 cannot read .*: no such file; .* by {SECRET_FILE}=FILE"
    with pytest.raises(UserError, match=said):
        share_secret(Blind(), tmp_path)
    assert list(tmp_path.iterdir()) == []
