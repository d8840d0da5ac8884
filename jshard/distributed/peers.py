"""A job's processes, as one of them sees the others: `with join(cluster) as peers`.

Nothing else in jshard has to know how many there are: alone, a process has no peers,
and every method returns at once.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax

from jshard.cli.user_code import describe_user_error
from jshard.distributed.cluster import ANY_PORT, PORT_TAKEN, Cluster
from jshard.distributed.heartbeat import GRACE, PERIOD, Watch
from jshard.distributed.idle import IdleWatch
from jshard.distributed.key_value import Board
from jshard.distributed.log import Log
from jshard.distributed.patience import Patience
from jshard.distributed.status import end_with_parent, report
from jshard.errors import Interrupted, Preempted, RunFailed, UserError

DAY = 86400.0  # seconds: as long as the watch lets a process wait
LONGEST_TRACEBACK = 20_000  # characters


class Peers:
    """A process that is alone.

    Attributes:
      index: which process this is.
      count: how many there are.
      hosts: the host of each process, as numbers from 0.
    """

    index = 0
    count = 1
    hosts: tuple[int, ...] = (0,)

    def at(self, phase: str, step: int) -> None:
        """Says where this process is: what it does in or after which step."""

    def limit(self, silence: float, stuck: float | None) -> None:
        """Sets the seconds of `watch.silence` and `watch.stuck`; None learns them."""

    def share(self, name: str, text: str) -> list[str]:
        """Gives a text to all, and returns everyone's; all processes call it.

        Raises:
          ValueError: the name was shared or published before.
        """
        return [text]

    def publish(self, name: str, text: str) -> str:
        """Returns process 0's text; all processes call it.

        Raises:
          ValueError: the name was shared or published before.
        """
        return text

    def open_log(self, folder: Path) -> None:
        """Starts this process's log in a run's folder."""

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Within it, an error of this process is told to all at once.

        For a `with` block inside of others, whose ends may wait for the others.
        """
        return contextlib.nullcontext()


@contextlib.contextmanager
def join(cluster: Cluster | None) -> Iterator[Peers]:
    """Makes this process one of a job's, by `jax.distributed.initialize`.

    Within it all processes are watched: when one fails, is killed or stopped, or cannot
    be reached, all end with exit code 1, in `watch.silence` seconds and a few more. A
    UserError of one ends all with 2. When all are through, they part together.

    Args:
      cluster: from `find_cluster`; None is a process alone.

    Raises:
      UserError: the coordinator's port is taken.
      SystemExit: with 75, in others than process 0, when the job is preempted; with
        98 where the port is taken and jshard.launch can choose another.
    """
    if cluster is None:
        with IdleWatch(_print) as idle:
            yield _Alone(idle)
        return
    end_with_parent()
    report(phase="waiting")
    _initialize(cluster)
    peers = _Many(cluster)
    try:
        with peers.telling():
            yield peers
    except Preempted:
        peers.leave(75)
        if peers.index == 0:
            raise
        sys.exit(75)
    except BaseException:
        peers.unwound()
    peers.leave(0)


def _initialize(cluster: Cluster) -> None:
    if cluster.process_id == 0 and cluster.coordinator:
        # JAX would abort, in C++.
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
        list(cluster.local_device_ids or ()),  # empty: all; None: JAX takes but one
    )


class _Alone(Peers):
    """A process that is alone, and watched."""

    def __init__(self, idle: IdleWatch):
        self._idle, self._patience = idle, Patience()

    def at(self, phase: str, step: int) -> None:
        self._idle.at(phase, step, self._patience.at(phase))

    def limit(self, silence: float, stuck: float | None) -> None:
        self._patience = Patience(stuck)


class _Many(Peers):
    """A process with others."""

    def __init__(self, cluster: Cluster):
        self.index, self.count = cluster.process_id, cluster.num_processes
        _keep_stdout_for_python(prints=self.index == 0)
        self._board = Board()
        self._log: Log | None = None
        self._patience = Patience()
        self._names: set[str] = set()  # that were shared or published
        self._told = threading.Event()  # whether this process's error is
        self._unwound = threading.Event()  # whether it left all its contexts
        self._watch = Watch(self._board, self.index, self.count, self._end)
        report(silence=self._watch.silence)
        names = self.share("host", _host_name())
        numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self.hosts = tuple(numbers[name] for name in names)
        by = cluster.found_by
        self._title = (
            f"process {self.index} of {self.count} ({by}), {socket.gethostname()}"
        )

    def at(self, phase: str, step: int) -> None:
        self._watch.at(f"step {step} ({phase})", self._patience.at(phase))
        if self._log is not None:
            self._log.place(phase, step)

    def limit(self, silence: float, stuck: float | None) -> None:
        self._watch.silence, self._patience = silence, Patience(stuck)
        report(silence=silence)

    def share(self, name: str, text: str) -> list[str]:
        self._claim(name)
        self._board.put(f"shared-{name}/{self.index}", text)
        together = ""
        if self.index == 0:  # it alone reads all: others read what it made of them
            while len(found := self._board.all_in(f"shared-{name}")) < self.count:
                time.sleep(PERIOD / 10)
            together = json.dumps([found[str(i)] for i in range(self.count)])
        return json.loads(self._publish(name, together))

    def publish(self, name: str, text: str) -> str:
        self._claim(name)
        return self._publish(name, text)

    def _publish(self, name: str, text: str) -> str:
        if self.index == 0:
            self._board.put(f"published/{name}", text)
        return self._board.get(f"published/{name}", DAY)

    def _claim(self, name: str) -> None:
        """Takes a name for one text: who is early would read the one before."""
        if name in self._names:
            raise ValueError(f"{name!r} was shared or published before: once is all")
        self._names.add(name)

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
            if not self._told.is_set():
                self._tell(error)
            raise

    def leave(self, code: int) -> None:
        """Waits until all are through, and parts from them."""
        self._watch.at("the end", left=True)
        self._watch.wait_until_done()
        report(ending=code)
        self._watch.stop()
        jax.distributed.shutdown()

    def unwound(self) -> NoReturn:
        """Ends a process that has told of its error, as the ruling says."""
        self._unwound.set()
        time.sleep(self._watch.silence + GRACE)
        os._exit(1)  # no ruling came

    def _tell(self, error: BaseException) -> None:
        """Tells all processes of an error of this one."""
        code, text = _describe(error)
        if _may_be_another_ones(error):
            # A collective fails here when its other end dies; let the watch name it.
            time.sleep(self._watch.silence + 3 * PERIOD)
        if isinstance(error, UserError) and self.index:
            time.sleep(2 * PERIOD)  # process 0 may have found the same
        if self._watch.ruling.code is not None:
            return
        self._told.set()
        if self.index == 0:
            _print(text)
        try:
            self._watch.fail(code, f"process {self.index}: {text}")
        except jax.errors.JaxRuntimeError:  # process 0, which prints, is not there
            _print(f"process {self.index}: {text}")

    def _end(self, code: int, why: str, ruled: bool) -> None:
        """Ends this process; called in a thread of the watch."""
        own = self._told.is_set()
        if self.index == 0 and not own:
            _print(why)
        elif self.index and not ruled:
            _print(f"process {self.index}: {why}")
        if self._log is not None:
            self._log.stacks(why)
        if self.index == 0:
            self._watch.wait_for_others()  # the board is here
            if own:
                self._unwound.wait(self._watch.silence)
        report(ending=code)
        sys.stdout.flush()
        os._exit(code)


def _keep_stdout_for_python(*, prints: bool) -> None:
    """Sends what C++ prints (Gloo does) to standard error, which the parent sorts.

    Where nothing is to be printed, that of Python goes there, too, and is logged.
    """
    if prints:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)


def _host_name() -> str:
    """What processes of one machine have in common, containers or not."""
    given = os.environ.get("JSHARD_HOST")
    if given:
        return given
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _describe(error: BaseException) -> tuple[int, str]:
    """The exit code and the text of an error."""
    if isinstance(error, UserError | RunFailed):
        text = " ".join(str(error).splitlines())
        code = 2 if isinstance(error, UserError) else 1
        return 130 if isinstance(error, Interrupted) else code, f"error: {text}"
    if isinstance(error, KeyboardInterrupt):
        return 130, "error: interrupted"
    if described := describe_user_error(error):
        line, lines = described
        return 1, f"error: {line}\n{lines[-LONGEST_TRACEBACK:]}"
    lines = "".join(traceback.format_exception(error))
    return 1, f"error: {type(error).__name__}\n{lines[-LONGEST_TRACEBACK:]}"


def _may_be_another_ones(error: BaseException) -> bool:
    out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory


def _print(text: str) -> None:
    below = "\n" if sys.stdout.isatty() else ""  # the live line
    os.write(2, f"{below}jshard: {text}\n".encode())
