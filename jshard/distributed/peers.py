"""The other processes of a job, as one of them sees them: `with join(...) as peers`.

The rest of jshard need not know how many processes there are. A single process has no
peers, and every method returns at once.
"""

import collections
import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NoReturn

import jax

from jshard.cli.command import expected_ending
from jshard.cli.user_code import describe_user_error
from jshard.distributed.cluster import ANY_PORT, PORT_TAKEN, Cluster
from jshard.distributed.heartbeat import GRACE, PERIOD, Heartbeat
from jshard.distributed.idle import IdleDetector
from jshard.distributed.key_value import KeyValueStore
from jshard.distributed.log import Log
from jshard.distributed.patience import Patience
from jshard.distributed.status import end_with_parent, report
from jshard.errors import Preempted, UserError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
DAY = 86400.0  # seconds: no limit, as the heartbeat ends processes that are stuck
LONGEST_TRACEBACK = 20_000  # characters


class Peers:
    """A single process; also the interface of a process in a job.

    Attributes:
      index: rank of this process.
      count: number of processes.
      hosts: the host of each process, as numbers from 0.
      shown: called with each phase and step, if there is one.
    """

    shown: Callable[[str, int], None] | None = None
    index = 0
    count = 1
    hosts: tuple[int, ...] = (0,)

    def __init__(self, idle: IdleDetector | None = None):
        self._idle, self._patience = idle, Patience()

    def at(self, phase: str, step: int) -> None:
        """Sets what this process is doing, in or after which step."""
        if self.shown is not None:
            self.shown(phase, step)
        if self._idle is not None:
            self._idle.at(phase, step, self._patience.at(phase))

    def limit(self, silence: float, stuck: float | None) -> None:
        """Sets `watch.silence` and `watch.stuck` in seconds; None learns the latter."""
        self._patience = Patience(stuck)

    def share(self, name: str, text: str) -> list[str]:
        """Returns the text of every process; all must call it with the same name.

        Raises:
          ValueError: the name was shared or published before.
        """
        return [text]

    def publish(self, name: str, text: str) -> str:
        """Returns process 0's text; otherwise like `share`."""
        return text

    def open_log(self, folder: Path) -> None:
        """Opens this process's log in a run's folder."""

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Reports an error raised within it to all processes at once.

        Without it, context managers around the error would exit first, which may
        wait for the other processes.
        """
        return contextlib.nullcontext()


@contextlib.contextmanager
def join(cluster: Cluster | None) -> Iterator[Peers]:
    """Connects this process to its job, by `jax.distributed.initialize`.

    Within it all processes are monitored: when one fails, is killed or stopped, or
    cannot be reached, all end with exit code 1 within a few seconds more than
    `watch.silence`. A UserError in one ends all with 2. At the end the processes wait
    for each other and disconnect.

    Args:
      cluster: from `find_cluster`; None is a single process.

    Raises:
      UserError: the coordinator's port is taken.
      SystemExit: with 75, in all but process 0, when the job is preempted; with 98 if
        the port is taken and jshard.launch can pick another.
    """
    if cluster is None:
        with IdleDetector(_print) as idle:
            yield Peers(idle)
        return
    end_with_parent()
    report(phase="waiting")
    _initialize(cluster)
    peers = _Distributed(cluster)
    try:
        with peers.telling():
            yield peers
    except Preempted:
        peers.leave(75)
        if peers.index == 0:
            raise
        sys.exit(75)
    except BaseException:
        peers.wait_for_end()
    peers.leave(0)


def _bind_address(coordinator: str | None) -> str | None:
    """Returns where process 0 listens; None is what JAX does, on all addresses.

    If the other processes reach it by this machine's own address, nobody else can.
    JAX_COORDINATOR_BIND_ADDRESS narrows it for jobs of several hosts.
    """
    given = "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
    host = (coordinator or "").rpartition(":")[0]
    return coordinator if host in LOOPBACK and not given else None


def _initialize(cluster: Cluster) -> None:
    if cluster.process_id == 0 and cluster.coordinator:
        # Checked first, as JAX would abort in C++.
        port = int(cluster.coordinator.rpartition(":")[2])
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE and ANY_PORT in os.environ:
                sys.exit(PORT_TAKEN)
            raise UserError(
                f"--coordinator={cluster.coordinator}: process 0 cannot listen there: "
                f"{os.strerror(error.errno or 0)}"
            ) from error
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        list(cluster.local_device_ids or ()),  # [] takes all devices, None only one
        coordinator_bind_address=_bind_address(cluster.coordinator),
    )


class _Sharing(Peers):
    """A process that shares texts through JAX's coordination service."""

    def __init__(self, index: int, count: int):
        super().__init__()
        self.index, self.count = index, count
        self._store = KeyValueStore()
        self._names: set[str] = set()  # shared or published

    def _find_hosts(self) -> None:
        names = self.share("host", _host_name())
        numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self.hosts = tuple(numbers[name] for name in names)

    def share(self, name: str, text: str) -> list[str]:
        self._store.put(f"shared-{name}/{self.index}", text)
        texts = ""
        if self.index == 0:  # it alone reads all keys; the others read its result
            while len(found := self._store.all_in(f"shared-{name}")) < self.count:
                time.sleep(PERIOD / 10)
            texts = json.dumps([found[str(i)] for i in range(self.count)])
        return json.loads(self.publish(name, texts))

    def publish(self, name: str, text: str) -> str:
        if name in self._names:  # a process could read the earlier text
            raise ValueError(f"{name!r} was shared or published before")
        self._names.add(name)
        if self.index == 0:
            self._store.put(f"published/{name}", text)
        return self._store.get(f"published/{name}", DAY)


class Members(_Sharing):
    """A process of a job that the user's program joined, and watches over, itself.

    A name may be shared again, since all processes make the same calls in one order.
    """

    _uses: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self) -> None:
        super().__init__(jax.process_index(), jax.process_count())
        self._find_hosts()

    def publish(self, name: str, text: str) -> str:
        """Returns process 0's text."""
        return super().publish(self._numbered(name), text)

    def share(self, name: str, text: str) -> list[str]:
        """Returns the text of every process."""
        return super().share(f"all-{self._numbered(name)}", text)

    def open_log(self, folder: Path) -> None:
        """Makes the folder of logs alone: the program prints where it likes."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def _numbered(self, name: str) -> str:
        self._uses[name] += 1
        return f"member-{name}-{self._uses[name]}"


class _Distributed(_Sharing):
    """A process of a job."""

    def __init__(self, cluster: Cluster):
        super().__init__(cluster.process_id, cluster.num_processes)
        _redirect_stdout(prints=self.index == 0)
        self._log: Log | None = None
        self._reported = threading.Event()  # this process's error
        self._unwound = threading.Event()  # all contexts have exited after an error
        self._heartbeat = Heartbeat(self._store, self.index, self.count, self._end)
        report(silence=self._heartbeat.silence)
        self._find_hosts()
        self._title = (
            f"process {self.index} of {self.count} ({cluster.found_by}), "
            f"{socket.gethostname()}"
        )

    def at(self, phase: str, step: int) -> None:
        super().at(phase, step)
        self._heartbeat.at(f"step {step} ({phase})", self._patience.at(phase))
        if self._log is not None:
            self._log.place(phase, step)

    def limit(self, silence: float, stuck: float | None) -> None:
        super().limit(silence, stuck)
        self._heartbeat.silence = silence
        report(silence=silence)

    def open_log(self, folder: Path) -> None:
        path = folder / "logs" / f"process-{self.index}.log"
        try:
            self._log = Log(path, self._title)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        report(log=str(path.absolute()))

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except Preempted:
            raise
        except BaseException as error:
            if not self._reported.is_set():
                self._report_error(error)
            raise

    def leave(self, code: int) -> None:
        """Waits until all processes are ready to leave, and disconnects."""
        self._heartbeat.leave()
        report(ending=code)
        jax.distributed.shutdown()

    def wait_for_end(self) -> NoReturn:
        """After an error was reported, waits until the verdict ends this process."""
        self._unwound.set()
        time.sleep(self._heartbeat.silence + GRACE)
        os._exit(1)  # no verdict came

    def _report_error(self, error: BaseException) -> None:
        code, text = _describe(error)
        out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory:
            # Collectives fail if another process dies; the heartbeat names that one.
            time.sleep(self._heartbeat.silence + 3 * PERIOD)
        if isinstance(error, UserError) and self.index:
            time.sleep(2 * PERIOD)  # process 0 may have found the same
        if self._heartbeat.verdict.code is not None:
            return
        self._reported.set()
        if self.index == 0:
            _print(text)
        try:
            self._heartbeat.fail(code, f"process {self.index}: {text}")
        except jax.errors.JaxRuntimeError:  # process 0, which would print it, is gone
            _print(f"process {self.index}: {text}")

    def _end(self, code: int, why: str, is_verdict: bool) -> None:
        """Ends this process; called in one of the heartbeat's threads."""
        own = self._reported.is_set()
        if self.index == 0 and not own:
            _print(why)
        elif self.index and not is_verdict:
            _print(f"process {self.index}: {why}")
        if self._log is not None:
            self._log.stacks(why)
        if self.index == 0:
            self._heartbeat.wait_for_others()  # the store ends with this process
            if own:
                self._unwound.wait(self._heartbeat.silence)
        report(ending=code)
        sys.stdout.flush()
        os._exit(code)


def _redirect_stdout(*, prints: bool) -> None:
    """Sends what C++ prints (Gloo does) to standard error, which the parent filters.

    In a process that prints nothing, Python's output goes there too, and to the log.
    """
    if prints:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)


def _host_name() -> str:
    """Returns what processes on one machine have in common, containers or not."""
    if given := os.environ.get("JSHARD_HOST"):
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _describe(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the text of an error."""
    if ending := expected_ending(error):
        code, message = ending
        return code, " ".join(message.splitlines())
    line = type(error).__name__
    lines = "".join(traceback.format_exception(error))
    if described := describe_user_error(error):
        line, lines = described
    return 1, f"error: {line}\n{lines[-LONGEST_TRACEBACK:]}"


def _print(text: str) -> None:
    newline = "\n" if sys.stdout.isatty() else ""  # below the live line
    os.write(2, f"{newline}jshard: {text}\n".encode())
