"""The other processes of a job, as one of them sees them.

The rest of jshard need not know how many processes there are. A single process has no
peers, and every method returns at once. In a job it shares texts with the others, and
ends with them.
"""

import collections
import contextlib
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

from jshard.system.cli.command import OUT_OF_MEMORY, expected_ending
from jshard.system.cli.terminal import is_terminal
from jshard.system.cli.user_code import describe_user_error
from jshard.system.compat.coordination import KeyValueStore
from jshard.system.errors import Interrupted, Preempted, UserError
from jshard.system.formatting import printable
from jshard.system.jobs.heartbeat import Heartbeat
from jshard.system.jobs.log import Log
from jshard.system.jobs.status import GRACE, PERIOD, SILENCE, report
from jshard.system.jobs.stuck import IdleDetector, Patience

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

    def __init__(self) -> None:
        self._idle: IdleDetector | None = None
        self._patience = Patience()

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

        It may be called in a thread, a name always in the same.
        """
        return [text]

    def publish(self, name: str, text: str) -> str:
        """Returns process 0's text; otherwise like `share`."""
        return self.share(name, "" if self.index else text)[0]

    def open_log(self, folder: Path) -> None:
        """Opens this process's log in a run's folder."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches over the processes within it, and tells if they are stuck."""
        with IdleDetector(print_line) as self._idle:
            try:
                yield
            finally:
                self._idle = None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Reports an error raised within it to all processes at once.

        Without it, context managers around the error would exit first, which may
        wait for the other processes.
        """
        return contextlib.nullcontext()


class Watched(Peers):
    """A process of a job, monitored while it has a heartbeat.

    It shares texts through JAX's coordination service.
    """

    # How often each name was shared in this process, whose jobs may be several.
    _rounds: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, index: int, count: int, found_by: str):
        super().__init__()
        self.index, self.count = index, count
        self._heartbeat: Heartbeat | None = None
        self._silence = SILENCE
        self._log: Log | None = None
        self._reported = threading.Event()  # this process's error
        self._unwound = threading.Event()  # all contexts have exited after an error
        self._title = f"process {index} of {count} ({found_by}), {socket.gethostname()}"

    def _start_heartbeat(self, name: str) -> Heartbeat:
        store = KeyValueStore(name)
        heartbeat = Heartbeat(store, self.index, self.count, self._end)
        heartbeat.silence = self._silence
        self._heartbeat = heartbeat
        return heartbeat

    def _find_hosts(self) -> None:
        names = self.share("host", _host_name())
        numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self.hosts = tuple(numbers[name] for name in names)

    def share(self, name: str, text: str) -> list[str]:
        """Returns the text of every process."""
        self._rounds[name] += 1
        number = self._rounds[name]
        here = KeyValueStore(f"{name} {number}")
        here.put(f"told/{self.index}", text)
        if self.index == 0:  # it alone reads all keys; the others read its result
            while len(found := here.all_in("told")) < self.count:
                time.sleep(PERIOD / 10)
            here.put("all", json.dumps([found[str(i)] for i in range(self.count)]))
            KeyValueStore(f"{name} {number - 1}").clear()  # all have read that
        return json.loads(here.get("all", DAY))

    def at(self, phase: str, step: int) -> None:
        """Sets what this process is doing, in or after which step."""
        super().at(phase, step)
        if self._heartbeat is not None:
            self._heartbeat.at(f"step {step} ({phase})", self._patience.at(phase))
            if self._log is not None:
                self._log.place(phase, step)

    def limit(self, silence: float, stuck: float | None) -> None:
        """Sets `watch.silence` and `watch.stuck`."""
        super().limit(silence, stuck)
        self._silence = silence
        if self._heartbeat is not None:
            self._heartbeat.silence = silence
        report(silence=silence)

    def open_log(self, folder: Path) -> None:
        """Opens this process's log in a run's folder."""
        path = folder / "logs" / f"process-{self.index}.log"
        try:
            self._log = Log(path, self._title)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        report(log=str(path.absolute()))

    def wait_for_end(self) -> NoReturn:
        """After an error was reported, waits until the verdict ends this process."""
        self._unwound.set()
        time.sleep(self._silence + GRACE)
        os._exit(1)  # no verdict came

    def _report_error(self, error: BaseException) -> None:
        code, text = _describe(error)
        out_of_memory = OUT_OF_MEMORY in str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory:
            # Collectives fail if another process dies; the heartbeat names that one.
            time.sleep(self._silence + 3 * PERIOD)
        if isinstance(error, UserError) and self.index:
            time.sleep(2 * PERIOD)  # process 0 may have found the same
        heartbeat = self._heartbeat
        if heartbeat is None or heartbeat.verdict.code is not None:
            return
        self._reported.set()
        if self.index == 0:
            print_line(text)
        try:
            heartbeat.fail(code, f"process {self.index}: {text}")
        except jax.errors.JaxRuntimeError:  # process 0, which would print it, is gone
            print_line(f"process {self.index}: {text}")

    def _end(self, code: int, why: str, is_verdict: bool) -> None:
        """Ends this process; called in one of the heartbeat's threads."""
        own = self._reported.is_set()
        if self.index == 0 and not own:
            print_line(why)
        elif self.index and not is_verdict:
            print_line(f"process {self.index}: {why}")
        if self._log is not None:
            self._log.stacks(why)
        if self.index == 0 and self._heartbeat is not None:
            self._heartbeat.wait_for_others()  # the store ends with this process
            if own:
                self._unwound.wait(self._silence)
        report(ending=code)
        sys.stdout.flush()
        os._exit(code)


class Members(Watched):
    """A process of a job that the user's program joined."""

    def __init__(self) -> None:
        super().__init__(jax.process_index(), jax.process_count(), "jax.distributed")
        self._find_hosts()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Monitors all processes within it, as `join` does.

        What all of them raise, each raises. If one alone fails, is killed or stopped,
        or cannot be reached, all end.
        """
        self.share("watch", "")  # all are here, so that none is missed at first
        heartbeat = self._start_heartbeat(f"beats {self._rounds['watch']}")
        try:
            with self.telling():
                yield
            heartbeat.leave()
        except BaseException:
            if self._reported.is_set():
                self.wait_for_end()
            raise
        finally:
            self._heartbeat = None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Reports an error raised within it, unless all processes raise one."""
        try:
            yield
        except BaseException as error:
            heartbeat = self._heartbeat
            if heartbeat is None or self._reported.is_set():
                raise
            # The processes agreed on these, after a save that may take its time.
            agreed = isinstance(error, Preempted | Interrupted)
            if not heartbeat.leave(None if agreed else GRACE):
                self._report_error(error)
            raise


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


def print_line(text: str) -> None:
    """Prints a line to standard error, from any thread.

    What another process said may hold what controls a terminal.
    """
    newline = "\n" if is_terminal(sys.stdout) else ""  # below the live line
    os.write(2, f"{newline}jshard: {printable(text)}\n".encode())
