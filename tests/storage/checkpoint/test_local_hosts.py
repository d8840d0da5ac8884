"""Local copies of two hosts, threads here: what each keeps, and takes from another."""

import collections
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import at_step, flip_bit
from jshard.storage.checkpoint.local import copy_files, exchange, local_copies
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.checkpoint.local.exchange import Exchange
from jshard.storage.checkpoint.local.local_copies import Copy, LocalCopies
from jshard.storage.checkpoint.local.pieces import (
    Division,
    Key,
    Piece,
    copy_shards,
    divide,
)
from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs.peers import Peers
from known_states import abstract, make_state

SECRET = b"the processes' secret"
SHARED = 2  # pieces that both processes have


class Member(Peers):
    """One of two processes, each on a host of its own."""

    count = 2
    hosts = (0, 1)

    def __init__(self, index: int, told: dict):
        super().__init__()
        self.index, self._told = index, told
        self._rounds: collections.Counter[str] = collections.Counter()

    def share(self, name: str, text: str) -> list[str]:
        self._rounds[name] += 1
        here = self._told[name, self._rounds[name]]
        here[self.index] = text
        deadline = time.monotonic() + 10
        while len(here) < 2:
            assert time.monotonic() < deadline, name
            time.sleep(0.001)
        return [here[0], here[1]]


def divided(state: Any, hosts: Any) -> Division:
    """A state's pieces, of which one process has half and another the rest."""
    keys = divide(state, (0,)).files[0]
    names = [*keys]
    files, alone, sizes = [], [], []
    for index in range(2):
        own, start = {}, 0
        for key in names[SHARED + index :: 2]:
            own[key] = Piece(start, keys[key].size)
            start += keys[key].size
        alone.append(start)
        for key in names[:SHARED]:
            own[key] = Piece(start, keys[key].size)
            start += keys[key].size
        files.append(own)
        sizes.append(start)
    return Division(files, alone, sizes, "digest")


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch) -> None:
    monkeypatch.setattr(local_copies, "divide", divided)
    monkeypatch.setattr(local_copies, "assemble", lambda state, read: read)
    monkeypatch.setattr(
        exchange.coordination, "address_of_process", lambda index: "127.0.0.1"
    )


class Hosts:
    """The two processes' copies; `start` begins another job with what is there."""

    def __init__(self, root: Path):
        self.root = root
        for index in range(2):
            (root / f"{index}").mkdir()
        self.start()

    def start(self) -> None:
        told: dict = collections.defaultdict(dict)
        self.copies = self.both(
            lambda i: LocalCopies(
                self.root / f"{i}", "/run", abstract(), Member(i, told), SECRET
            )
        )

    def both(self, action: Any) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(action, range(2)))

    def keep(self, *steps: int) -> list[list[Copy]]:
        ended: list[list[Copy]] = [[], []]

        def keep(index: int) -> None:
            for step in steps:
                state = at_step(make_state(abstract()), step)
                texts = {"who": f"{index}"}
                self.copies[index].keep(state, "it", 0, texts, ended[index].append)
            self.copies[index].wait()

        self.both(keep)
        return ended

    def find(self, starts: Any = (), least: int = 1) -> list[Any]:
        return self.both(lambda i: self.copies[i].find("it", starts, least))

    def folder(self, index: int) -> Path:
        (folder,) = (self.root / f"{index}").glob("jshard-*")
        return folder

    def files(self, index: int) -> list[str]:
        folder = self.folder(index)
        return sorted(p.relative_to(folder).as_posix() for p in folder.glob("*/*"))


@pytest.fixture
def hosts(tmp_path) -> Hosts:
    return Hosts(tmp_path)


def wanted(index: int) -> dict[Key, bytes]:
    """The bytes of the pieces of a process."""
    division = divided(abstract(), ())
    stored = bytearray(division.sizes[index])

    def write(start: int, data: Any) -> None:
        stored[start : start + data.size] = data.tobytes()

    state = at_step(make_state(abstract()), 6)
    copy_shards(state, division.files[index], write)
    return {
        key: bytes(stored[piece.start : piece.start + piece.size])
        for key, piece in division.files[index].items()
    }


def check(hosts: Hosts, step: int = 6) -> None:
    """Both processes find a copy and get what they had."""
    for index, found in enumerate(hosts.find()):
        assert (found.step, found.note) == (step, "")
        assert (found.texts / "who").read_text() == f"{index}"
    for index, read in enumerate(hosts.both(lambda i: hosts.copies[i].restore(step))):
        for key, content in wanted(index).items():
            assert read(key).tobytes() == content


def test_each_host_has_its_own_copy_and_what_the_other_has_alone(hosts):
    ended = hosts.keep(3, 6)
    division = divided(abstract(), ())
    for index in range(2):
        assert [copy.step for copy in ended[index]] == [3, 6]
        assert [copy.error for copy in ended[index]] == ["", ""]
        assert {copy.size for copy in ended[index]} == {division.sizes[index]}
        for copy in ended[index]:
            assert 0 <= copy.blocked <= copy.took < 60
            assert 0 <= copy.waited < 60
        own, other = f"{index}", f"{1 - index}"
        assert hosts.files(index) == sorted(
            [f"{own}/6.bytes", f"{own}/6.json", f"{own}/spare",
             f"{other}/6.bytes", f"{other}/6.json"]
        )  # fmt: skip
        sizes = {
            label.owner: label.size for label in copy_files.labels(hosts.folder(index))
        }
        assert sizes == {
            index: division.sizes[index], 1 - index: division.alone[1 - index]
        }  # fmt: skip
    hosts.start()
    check(hosts)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_gets_its_copy_from_the_other(lost, hosts):
    hosts.keep(6)
    shutil.rmtree(hosts.folder(lost))
    hosts.start()
    check(hosts)


def test_a_part_that_is_damaged_is_taken_from_the_other_host(hosts):
    hosts.keep(6)
    flip_bit(hosts.folder(0) / "0/6.bytes")
    hosts.start()
    check(hosts)


def test_parts_that_are_damaged_on_both_hosts_are_not_used_and_it_is_said(hosts):
    hosts.keep(6)
    for index in range(2):
        flip_bit(hosts.folder(index) / "1/6.bytes")
    hosts.start()
    for found in hosts.find():
        assert found.step is None
        assert found.note == (
            "the copy of step 6 on the hosts is not used: the part of process 1 is "
            "lost or damaged"
        )
    shutil.rmtree(hosts.folder(0) / "0")
    hosts.start()
    (hosts.folder(1) / "0/6.json").unlink()
    for found in hosts.find():
        assert found.note.endswith("the part of process 0 is lost or damaged")


def test_the_newest_copy_that_is_whole_is_used(hosts):
    hosts.keep(6)
    for index in range(2):
        folder = hosts.folder(index)
        shutil.copytree(folder, folder.with_name("kept"))
    hosts.keep(9)
    for index in range(2):
        folder = hosts.folder(index)
        shutil.copytree(folder.with_name("kept"), folder, dirs_exist_ok=True)
        shutil.rmtree(folder.with_name("kept"))
        (folder / "0/9.json").unlink()  # the part of process 0 is nowhere
    hosts.start()
    check(hosts)
    for found in hosts.find(least=7):
        assert found.step is None
        told = "the copy of step 9 on the hosts is not used: the part of process 0 is"
        assert found.note.startswith(told)
    assert [found.step for found in hosts.find(least=6)] == [6, 6]


def test_a_copy_that_fails_on_one_host_is_removed_on_both(hosts, monkeypatch):
    hosts.keep(3)
    keep = exchange._Request._keep

    def refuse(self, connection: Any, label: Label, folder: Path) -> None:
        if label.owner == 0:
            raise OSError(28, "No space left on device")
        keep(self, connection, label, folder)

    monkeypatch.setattr(exchange._Request, "_keep", refuse)
    for ended in hosts.keep(6):
        assert [copy.error for copy in ended] == ["process 0: No space left on device"]
    for index in range(2):
        steps = {step for _, step in copy_files.listed(hosts.folder(index))}
        assert steps == {3}
    assert [found.step for found in hosts.find()] == [3, 3]


def test_what_protects_from_what_is_described(hosts):
    division = divided(abstract(), ())
    for index, copies in enumerate(hosts.copies):
        line = copies.describe(5)
        assert line.startswith(f"every 5 steps in {hosts.folder(index)}, 2 x ")
        assert " for its neighbor; they survive a lost host" in line
    object.__setattr__(hosts.copies[0]._division, "alone", [0, division.alone[1]])
    assert (
        hosts.copies[0]
        .describe(5)
        .endswith("; they survive a lost host: replicas have the same state")
    )
    alone = LocalCopies(hosts.root / "0", "/other", abstract(), Peers())
    assert alone.describe(5).endswith("killed processes only: there is one host")


@pytest.mark.parametrize(("left", "fine"), [(0, True), (1, False)])
def test_room_is_needed_for_two_copies_and_two_of_the_neighbor(
    left, fine, hosts, monkeypatch
):
    division = divided(abstract(), ())
    hosts.keep(6)
    used = copy_files.used(hosts.folder(0))
    needed = 2 * (division.sizes[0] + division.alone[1])
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(
        local_copies.shutil, "disk_usage", lambda folder: usage(needed - used - left)
    )
    if fine:
        hosts.copies[0]._check_room()
    else:
        with pytest.raises(UserError, match=r"the copies take .* on each host"):
            hosts.copies[0]._check_room()


def test_processes_of_one_host_leave_each_others_copies_alone(tmp_path):
    """Of four on two hosts, process 0 has the copies of process 2."""
    copies: Any = LocalCopies(tmp_path, "/run", abstract(), Peers())
    copies._peers.hosts, copies._neighbors = (0, 0, 1, 1), [2, 3, 0, 1]
    folder = copies._folder
    for owner, step in [(o, s) for o in range(4) for s in (3, 6)]:
        copy_files.create(folder, owner, step, 1).close()
        copy_files.seal(folder, Label("it", 0, "", owner, step, 1, [], {}))
    copies._retire(6, is_whole=True)
    left = [(0, 6), (1, 3), (1, 6), (2, 6), (3, 3), (3, 6)]
    assert copy_files.listed(folder) == left
    copies._retire(6, is_whole=False)
    assert copy_files.listed(folder) == [(1, 3), (1, 6), (3, 3), (3, 6)]
    assert copies._received_by(0) == [2]
    assert copies._of_this_host() == [0, 1]


# The connections.


def test_what_another_process_lacks_is_an_error(hosts):
    hosts.keep(6)
    ask: Exchange = hosts.copies[0]._exchange
    assert ask.label(1, 1, 6).owner == 1
    for owner, step in ((1, 7), (2, 6)):
        with pytest.raises(OSError, match="process 1 has no such copy"):
            ask.label(1, owner, step)
    (whole,) = ask.fetch(1, 1, 6, [Piece(0, 10)])
    there = (hosts.folder(1) / "1/6.bytes").read_bytes()
    assert whole.tobytes() == there[:10]
    parts = ask.fetch(1, 1, 6, [Piece(4, 6), Piece(0, 0), Piece(2, 3)])
    assert [part.tobytes() for part in parts] == [there[4:10], b"", there[2:5]]
    with pytest.raises(OSError, match="the connection broke"):
        list(ask.fetch(1, 1, 7, [Piece(0, 10)]))
    hosts.find()
    with pytest.raises(
        RunFailed, match="process 0 cannot fetch its copy from process 1"
    ):
        dict(hosts.copies[0]._read(1, 1, 7, [*wanted(1)][:1]))


def test_large_copies_are_received_in_blocks(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "_BLOCK", 7)
    content = bytes(range(20))
    folder = tmp_path / "more"
    folder.mkdir()
    with copy_files.create(folder, 0, 9, 20) as file:
        file.write(content)
    ask: Exchange = hosts.copies[0]._exchange
    ask.send(1, Label("it", 0, "", 0, 9, 20, [], {}), folder)
    assert (hosts.folder(1) / "0/9.bytes").read_bytes() == content
    assert copy_files.listed(hosts.folder(1)) == [(0, 9)]
    with copy_files.create(folder, 0, 10, 0):
        ask.send(1, Label("it", 0, "", 0, 10, 0, [], {}), folder)
    assert (hosts.folder(1) / "0/10.bytes").read_bytes() == b""


def test_the_listener_ends_with_its_process(hosts):
    threads = [t for t in threading.enumerate() if t.name == "jshard-local-copies"]
    assert len(threads) >= 2
    assert all(thread.daemon for thread in threads)
    assert exchange._Server.daemon_threads
