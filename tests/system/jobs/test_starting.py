"""Processes meet before JAX connects them: who ends or does not fit is named."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import jshard.launch
from jobs import Job, children, free_port, write_recipe
from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs import job, rendezvous
from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.rendezvous import gathered
from jshard.system.network.authenticated import Caller, Connection, call

SOON = 5.0  # seconds
SECRET = b"the processes' secret"


class Start:
    """Processes of a job that start, as threads.

    Args:
      clusters: Rank and number of processes of each.
      within: What each waits for while JAX would connect it.

    Attributes:
      ends: What each ended with: None, or an exception.
    """

    def __init__(
        self, *clusters: tuple[int, int], within: threading.Event | None = None
    ):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.ends: dict[int, Any] = {}
        self._within = within
        self._threads = []
        for number, (index, count) in enumerate(clusters):
            cluster = Cluster(index, count, self.address, None, "options")
            thread = threading.Thread(target=self._run, args=(number, cluster))
            thread.start()
            self._threads.append(thread)

    def _run(self, number: int, cluster: Cluster) -> None:
        listener = None
        if cluster.process_id == 0:
            listener = socket.create_server(("127.0.0.1", self.port))
        try:
            with gathered(cluster, listener, SECRET):
                if self._within is not None:
                    assert self._within.wait(SOON)
        except BaseException as error:
            self.ends[number] = error
        else:
            self.ends[number] = None

    def wait(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()
        return self.ends


def connect(start: Start) -> socket.socket:
    deadline = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection(("127.0.0.1", start.port), SOON)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def come(start: Start, index: int, count: int) -> Connection:
    """The connection of a process that has come."""
    deadline = time.monotonic() + SOON
    address = ("127.0.0.1", start.port)
    while True:
        try:
            return call(address, "meeting", SECRET, process=index, processes=count)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def no_address(*args: Any, **kwargs: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def record_ends(monkeypatch) -> list[int]:
    """With what processes end; the threads that end them stay there, as those do.

    One that went on would end its process again, in the midst of the next test.
    """
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        threading.Event().wait()

    monkeypatch.setattr(rendezvous, "_end", end)
    return codes


def test_processes_meet_in_any_order_and_strangers_do_not_count():
    start = Start((2, 4), (1, 4), (0, 4))
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"process": "x"}\n', b"x" * 999):
        with connect(start) as stranger:
            stranger.sendall(text)
    with come(start, 3, 4) as last:
        assert start.wait() == {0: None, 1: None, 2: None}
        last.send(joined=True)
    # The port is JAX's now.
    socket.create_server(("127.0.0.1", start.port)).close()


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        (
            [(0, 2), (1, 3)],
            "process 1 was started with --num_processes=3, and process 0 with "
            "--num_processes=2: give all the same",
        ),
        ([(0, 3), (1, 2)], "process 1 was started with --num_processes=2, and"),
        ([(0, 2), (2, 4)], "process 2 was started with --num_processes=4, and"),
        (
            [(0, 3), (1, 3), (1, 3)],
            "several processes were started with --process_id=1",
        ),
    ],
)
def test_processes_of_different_jobs_are_refused_in_one_line(clusters, said):
    ends = Start(*clusters).wait()
    assert str(ends[0]).startswith(said)
    assert isinstance(ends[0], UserError)
    others = [ends[number] for number in range(1, len(clusters))]
    assert any(str(end).startswith(said) for end in others)
    for end in others:
        assert isinstance(end, UserError) or end.code == 2


def test_a_process_that_ends_before_all_are_there_is_named_at_once():
    start = Start((0, 4))
    with come(start, 2, 4) as other:
        come(start, 1, 4).close()
        why = "process 1 ended while the job was starting"
        assert str(start.wait()[0]).startswith(why)
        assert other.receive()["code"] == 1


def test_a_process_that_ends_before_it_has_joined_is_named_at_once(monkeypatch, capfd):
    """While JAX connects the processes, from which no Python gets away."""
    codes = record_ends(monkeypatch)
    connecting = threading.Event()
    start = Start((0, 3), within=connecting)
    with come(start, 2, 3) as other:
        with come(start, 1, 3) as killed:
            for each in (other, killed):
                assert each.receive() == {"code": None}
        assert other.receive() == {"code": 1, "culprit": 0}
        deadline = time.monotonic() + SOON
        while not codes:  # the others are told before
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert codes == [1]
    connecting.set()
    start.wait()
    line = "jshard: error: process 1 ended while the job was starting"
    assert capfd.readouterr().err.startswith(line)


def test_who_has_joined_may_end(monkeypatch):
    codes = record_ends(monkeypatch)
    connecting = threading.Event()
    start = Start((0, 2), within=connecting)
    with come(start, 1, 2) as other:
        other.receive()
        other.send(joined=True)
    time.sleep(0.1)
    connecting.set()
    assert start.wait() == {0: None}
    assert codes == []


def test_process_0_that_ends_is_named_at_once():
    port = free_port()
    cluster = Cluster(1, 2, f"127.0.0.1:{port}", None, "options")
    with socket.create_server(("127.0.0.1", port)) as listener:

        def first() -> None:
            Caller(*listener.accept(), "meeting", SECRET).wait()[0].close()

        threading.Thread(target=first, daemon=True).start()
        said = "process 0, which coordinates, ended while"
        with pytest.raises(RunFailed, match=said), gathered(cluster, None, SECRET):
            raise AssertionError("not gathered")


def test_a_process_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.5)
    ends = Start((0, 3), (1, 3)).wait()
    assert str(ends[0]) == "process 2 did not start in 0.5 s"
    assert ends[1].code == 1


@pytest.mark.parametrize("nodes", ["no-node[07-9,12],b", "no-node07,b", "no-node07"])
def test_slurm_s_first_node_without_an_address_is_named_at_once(nodes, monkeypatch):
    monkeypatch.setattr(job, "NAMED", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    said = "process 0 is on no-node07, .* no address .* give --coordinator=HOST:PORT"
    with (
        pytest.raises(UserError, match=said),
        job.join(Cluster(1, 2, None, None, "SLURM")),
    ):
        raise AssertionError("joined")


def test_a_coordinator_without_an_address_is_named_while_others_wait(
    monkeypatch, capfd
):
    monkeypatch.setattr(rendezvous, "PATIENCE", 1.0)
    monkeypatch.setattr(rendezvous, "NAMED", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    cluster = Cluster(1, 2, "no-node07:2000", None, "options")
    with pytest.raises(RunFailed), gathered(cluster, None, SECRET):
        raise AssertionError("not gathered")
    said = "process 1 waits for process 0: this machine knows no address of no-node07 ("
    assert capfd.readouterr().err.count(said) == 1


# Real processes.


def connections(pid: int) -> int:
    """How many TCP connections a process has accepted or made."""
    rows = [
        line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().split("\n")
    ]
    established = {f"socket:[{row[9]}]" for row in rows if row[3:4] == ["01"]}
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            count += os.readlink(link) in established
    return count


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_job_ends_soon_where_a_process_is_killed_at_its_start(victim, tmp_path):
    """Two of three have met; the third is late."""
    write_recipe(tmp_path)
    late = {2: ["sh", "-c", 'sleep 20; exec "$@"', "sh"]}
    with Job(
        tmp_path, 3, 1, "--workdir=run", prefix=lambda index: late.get(index, [])
    ) as job:
        deadline = time.monotonic() + 60
        while any(p.poll() is None and not children(p.pid) for p in job.processes[:2]):
            time.sleep(0.05)
        while not connections(job.worker(0)):  # the other has come
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # they have greeted each other
        worker = job.worker(victim)
        job.processes[victim].kill()
        os.kill(worker, signal.SIGKILL)
        since = time.monotonic()
        survivor = 1 - victim
        assert job.processes[survivor].wait(SOON) == 1
        assert time.monotonic() - since < SOON
        named = "process 0, which coordinates," if victim == 0 else "process 1"
        assert f"{named} ended while the job was starting" in job.err(survivor)


@pytest.mark.slow
def test_a_job_whose_processes_count_differently_does_not_train(tmp_path):
    write_recipe(tmp_path)
    each = {1: ["--num_processes=3"]}
    with Job(tmp_path, 2, 1, "--workdir=run", each=each) as job:
        assert job.wait(60) == [2, 2]
        for index in range(2):
            (line,) = job.err(index).splitlines()
            assert "process 1 was started with --num_processes=3, and" in line
    assert not (tmp_path / "run").exists()


KILLED = """\
#!/bin/sh
case "$*" in
  *--process_id=1*) kill -s KILL $$;;
esac
trap "exit 1" USR2
while true; do sleep 0.05; done
"""


def test_the_launcher_names_who_was_killed_and_ends_who_waits(
    tmp_path, monkeypatch, capfd
):
    script = tmp_path / "python"
    script.write_text(KILLED)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    words = ["--num_processes=3", "--", "--config=x"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))
    since = time.monotonic()
    assert launcher.run() == 1
    assert time.monotonic() - since < SOON
    line = "jshard: error: process 1 was ended by SIGKILL"
    assert line in capfd.readouterr().err.splitlines()
