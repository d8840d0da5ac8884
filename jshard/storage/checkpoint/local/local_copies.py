"""Copies of a state in the memory of the hosts, and a start from them.

Every process copies the shards of its devices to a file of its own, and sends what no
other host has to a process of the next host. All that happens in a thread; it ends with
an agreement of all processes that the copy is whole, and only then is the one before
removed. So of each step's copy that was agreed upon, all parts are there twice.
"""

import dataclasses
import functools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint.local import copy_files
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.checkpoint.local.exchange import Exchange
from jshard.storage.checkpoint.local.pieces import (
    Holders,
    Key,
    assemble,
    copy_shards,
    divide,
    neighbors,
)
from jshard.system.errors import RunFailed, UserError
from jshard.system.formatting import format_bytes
from jshard.system.jobs.peers import Peers


@dataclasses.dataclass(frozen=True)
class Copy:
    """The outcome of a copy."""

    step: int
    waited: float  # seconds that `keep` waited for the copy before
    blocked: float  # seconds that it took to copy the shards from the devices
    took: float  # seconds until the copy was whole
    size: int  # the bytes of this process's shards
    error: str = ""  # why it failed in some process, on one line


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest copy that a run can start from."""

    step: int | None = None  # the state's; None if there is none
    texts: Path | None = None  # a folder with what this process kept besides
    note: str = ""  # why copies that are there are not used


class LocalCopies:
    """The local copies of a run, as one of its processes sees them.

    Args:
      root: The folder for copies, of each host's own: in memory, or on a disk.
      name: The absolute path of the run's folder, or its URL.
      abstract: The run's state.
      peers: All processes; each calls every method, at the same steps.
      secret: The job's, by which the processes know each other.

    Raises:
      UserError: The folder cannot be used, or has not enough room.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        abstract: TrainState,
        peers: Peers,
        secret: bytes = b"",
    ):
        self._abstract, self._peers = abstract, peers
        self._root, self._name = root, name
        self._folder = copy_files.make_folder(root, name)
        self._division = divide(abstract, peers.hosts)
        self._neighbors = neighbors(peers.hosts)
        self._size = self._division.sizes[peers.index]
        self._check_room()
        several = peers.count > 1
        self._exchange = Exchange(peers, self._folder, secret) if several else None
        self._found: Holders | None = None  # of the copy that `find` found
        self._thread: threading.Thread | None = None

    # Where the files are.

    def _check_room(self) -> None:
        needed = 0
        for process in self._of_this_host():
            received = (self._division.alone[p] for p in self._received_by(process))
            needed += 2 * (self._division.sizes[process] + sum(received))
        disk = shutil.disk_usage(self._folder)
        if needed > disk.free + copy_files.used(self._folder):
            raise UserError(
                f"checkpoint.local: the copies take {format_bytes(needed)} on each "
                f"host, and {self._folder.parent} has {format_bytes(disk.free)} left: "
                "make room (a container's /dev/shm is small by default), or give a "
                "folder of each host's own by --config.checkpoint.local_dir=DIR"
            )

    def _of_this_host(self) -> list[int]:
        hosts = self._peers.hosts
        here = hosts[self._peers.index]
        return [process for process, host in enumerate(hosts) if host == here]

    def _received_by(self, process: int) -> list[int]:
        return [p for p, to in enumerate(self._neighbors) if to == process]

    def describe(self, every: int) -> str:
        """Returns a line for the user: where copies are, and what they protect from."""
        own, index = format_bytes(self._size), self._peers.index
        where = f"every {every} steps in {self._folder}, 2 x {own} per process"
        if self._neighbors[index] is None:
            return f"{where}; they survive killed processes only: there is one host"
        sent = self._division.alone[index]
        if not sent:
            return f"{where}; they survive a lost host: replicas have the same state"
        where += f" and 2 x {format_bytes(sent)} for its neighbor"
        return f"{where}; they survive a lost host"

    # Copying.

    def keep(
        self,
        state: TrainState,
        run: str,
        start: int,
        texts: Mapping[str, str],
        report: Callable[[Copy], None],
    ) -> None:
        """Starts to copy a state; returns once the state may be donated.

        Waits for the copy before it. A copy that fails is reported and never raised.

        Args:
          state: The state of all processes.
          run: Identifies the run.
          start: How many times it had been started before.
          texts: What this process keeps besides.
          report: Called with the outcome, in another thread.
        """
        step, own = int(state.step), self._peers.index
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        jax.block_until_ready(state)
        began = time.perf_counter()
        pieces, problem = self._division.files[own], ""
        try:
            with copy_files.create(self._folder, own, step, self._size) as file:
                copy_shards(state, pieces, functools.partial(copy_files.write, file))
        except OSError as error:
            problem = _why(error)
        blocked = time.perf_counter() - began

        def label(size: int) -> Label:
            data = copy_files.read(self._folder, own, step)[:size]
            sums = copy_files.sums(data, pieces.values())
            digest = self._division.digest
            return Label(run, start, digest, own, step, size, sums, texts)

        def finish() -> None:
            nonlocal problem
            try:
                if not problem:
                    copy_files.seal(self._folder, label(self._size))
                    self._send(label)
            except OSError as error:
                problem = _why(error)
            try:
                problems = self._peers.share("copied", problem)
            except jax.errors.JaxRuntimeError:
                return  # the job ends
            failed = [f"process {i}: {text}" for i, text in enumerate(problems) if text]
            self._retire(step, is_whole=not failed)
            took = time.perf_counter() - began
            error = failed[0] if failed else ""
            report(Copy(step, waited, blocked, took, self._size, error))

        # A daemon: if a process has died, the others wait for it in vain.
        self._thread = threading.Thread(target=finish, name="local-copy", daemon=True)
        self._thread.start()

    def _send(self, label: Callable[[int], Label]) -> None:
        own = self._peers.index
        to = self._neighbors[own]
        if to is not None:
            assert self._exchange is not None
            self._exchange.send(to, label(self._division.alone[own]), self._folder)

    def _retire(self, step: int, *, is_whole: bool) -> None:
        """Removes the copies before a whole one, or the parts of one that is not."""
        own = self._peers.index
        theirs = {*self._of_this_host()}  # of other processes of this host, which do it
        theirs |= {owner for p in theirs for owner in self._received_by(p)}
        theirs -= {own, *self._received_by(own)}
        for owner, found in copy_files.listed(self._folder):
            old = found < step if is_whole else found == step
            if old and owner not in theirs:
                copy_files.drop(self._folder, owner, found, reuse=owner == own)

    def wait(self) -> None:
        """Waits for the copy in progress, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def delete(self) -> None:
        """Removes all copies of the run, which is over; waits for the last first."""
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Starting from copies.

    def find(self, run: str, starts: Sequence[int], least: int) -> Found:
        """Finds the newest copy that is whole, wherever its parts are.

        Args:
          run: Identifies the run; empty finds no copies.
          starts: The steps after which the run was started again so far. A later step
            of a start before it is not the run's any more.
          least: The smallest step that is of use.
        """
        copy_files.make_folder(self._root, self._name)  # `delete` removed it
        kept, foreign = [], 0
        for label in copy_files.labels(self._folder):
            last = min(starts[label.start :], default=label.step)
            if label.run != run or label.step > last:
                continue
            if label.division == self._division.digest:
                kept.append(label)
            else:
                foreign = max(foreign, label.step)
        copy_files.tidy(self._folder, kept)
        mine = [[label.owner, label.step, label.size] for label in kept]
        told = self._peers.share("local copies", json.dumps([mine, foreign]))
        tables, foreigners = zip(*map(json.loads, told), strict=True)
        steps = {step for table in tables for _, step, _ in table}
        notes = []  # why the first of the copies that are of no use is not used
        if max(foreigners) >= max(least, 1, *steps):
            newest = max(foreigners)
            notes.append(f"copies of step {newest} on the hosts are of another mesh")
        for step in sorted(steps, reverse=True):
            if step < least:
                break
            damaged = self._damaged(step, kept)
            told = self._peers.share("damaged copies", json.dumps(damaged))
            copies: dict[int, list[tuple[int, int]]]
            copies = {owner: [] for owner in range(self._peers.count)}
            for holder, (table, bad) in enumerate(zip(tables, told, strict=True)):
                for owner, of, size in table:
                    if of == step and [owner, size] not in json.loads(bad):
                        copies[owner].append((holder, size))
            self._found = Holders(self._division, copies)
            missing = self._found.missing()
            if not missing:
                texts = self._label(step, kept).texts
                own = self._peers.index
                # A newer one may not have been complete when the job ended.
                return Found(step, copy_files.unpack(self._folder, own, texts))
            bad = " or damaged" if any(map(json.loads, told)) else ""
            notes.append(
                f"the copy of step {step} on the hosts is not used: the part of "
                f"process {missing[0]} is lost{bad}"
            )
        return Found(note="".join(notes[:1]))

    def _damaged(self, step: int, kept: Sequence[Label]) -> list[tuple[int, int]]:
        """Verifies the copies of a step that are here; returns owners and sizes."""
        found = []
        for label in kept:
            if label.step == step:
                data = copy_files.read(self._folder, label.owner, step)
                pieces = self._division.files[label.owner].values()
                if copy_files.sums(data, pieces) != label.sums:
                    found.append((label.owner, label.size))
        return found

    def _label(self, step: int, kept: Sequence[Label]) -> Label:
        own = self._peers.index
        for label in kept:
            if (label.owner, label.step) == (own, step):
                return label
        assert self._found is not None
        assert self._exchange is not None
        holder, _ = self._found.copies[own][0]
        try:
            return self._exchange.label(holder, own, step)
        except OSError as error:
            raise self._failed(holder, error) from error

    def restore(self, step: int) -> TrainState:
        """Returns the state of the copy that was found.

        Raises:
          RunFailed: A part cannot be fetched from another host.
        """
        assert self._found is not None
        parts = {
            key: data
            for source, keys in self._found.sources(self._peers.index).items()
            for key, data in self._read(*source, step, keys)
        }
        return assemble(self._abstract, parts.__getitem__)

    def _read(
        self, holder: int, owner: int, step: int, keys: Sequence[Key]
    ) -> Iterator[tuple[Key, np.ndarray]]:
        pieces = [self._division.files[owner][key] for key in keys]
        if holder == self._peers.index:
            data = copy_files.read(self._folder, owner, step)
            for key, piece in zip(keys, pieces, strict=True):
                yield key, data[piece.start : piece.start + piece.size]
            return
        assert self._exchange is not None
        try:
            yield from zip(
                keys, self._exchange.fetch(holder, owner, step, pieces), strict=True
            )
        except OSError as error:
            raise self._failed(holder, error) from error

    def _failed(self, holder: int, error: OSError) -> RunFailed:
        return RunFailed(
            f"process {self._peers.index} cannot fetch its copy from process {holder}: "
            f"{_why(error)}; to start from the newest checkpoint instead, remove "
            f"{self._folder} on all hosts"
        )


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
