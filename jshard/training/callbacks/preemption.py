"""Signals that end a run: save first, then stop."""

import os
import signal
import threading
from typing import Self

import jax
from jax.experimental import multihost_utils

from jshard.data.loader_processes import leave_to_run
from jshard.system.cli.terminal import leave_closed_terminal, outliving_terminal, show

DEMANDS = (signal.SIGINT, signal.SIGTERM)
# Of a closed terminal, and a scheduler's warning. They may come more than once, as to a
# process and to its parent, which passes them on.
WARNINGS = (signal.SIGHUP, signal.SIGUSR1)


def _after_fork() -> None:
    # What was forked to read data has left these to the run already.
    handlers = map(signal.getsignal, (signal.SIGINT, *WARNINGS))
    if any(getattr(x, "__func__", None) is Preemption._handle for x in handlers):
        leave_to_run()


os.register_at_fork(after_in_child=_after_fork)


class Preemption:
    """Handles SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 while a run trains.

    A context manager. The first signal asks the run to finish its step, save and stop.
    A second SIGTERM or SIGINT ends the process, with exit code 143 or 130; SIGHUP and
    SIGUSR1 never do. All are answered at once, even while the main thread waits for the
    compiler or the devices. A signal that is ignored, like Ctrl-C in a shell's
    background jobs or SIGHUP under nohup, stays ignored, and the program's own handlers
    of SIGHUP and SIGUSR1 stay. SIGQUIT ends a process as ever, which is its use.

    With several processes, a SIGTERM to any of them stops all: JAX handles it in C++,
    and within about a second the processes agree on a step to stop after. A Python
    handler would silently replace JAX's, so there is none for SIGTERM, and:

    - The first Ctrl-C, SIGHUP or SIGUSR1 becomes a SIGTERM; the second Ctrl-C ends
      that process.
    - A second SIGTERM does nothing. A process that waits for a dead one ends by
      SIGKILL, or by Ctrl-C twice.
    - Nothing else may handle SIGTERM after `jax.distributed.initialize`.

    Attributes:
      signal_name: The first signal; None before there is one.
    """

    def __init__(self, *, saves: bool = True, exits: bool = True) -> None:
        self.signal_name: str | None = None
        self._exits = exits
        self._demands = 0  # as the main thread has seen
        self._reaction = f"finishing the step{' and saving' if saves else ''}"
        self._alone = jax.process_count() == 1

    def requested(self, step: int) -> bool:
        """Returns whether the run is to save and stop after this step.

        With several processes, each must call this after every step; all of them get
        the same answer.
        """
        if not self._alone and multihost_utils.reached_preemption_sync_point(step):
            self.signal_name = self.signal_name or "SIGTERM"
            return True
        return self._alone and self.signal_name is not None

    def __enter__(self) -> Self:
        self._handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
        for number in (*DEMANDS, *WARNINGS):
            handler = signal.getsignal(number)
            # None: installed outside of Python, which could not restore it.
            kept = handler in (signal.SIG_IGN, None)
            if number in WARNINGS:
                kept = handler != signal.SIG_DFL
            if not kept and (self._alone or number != signal.SIGTERM):
                self._handlers[number] = handler
        # A Python handler runs once the main thread is back in Python. What is written
        # to this pipe reaches another thread at once.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1])
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        for number in self._handlers:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: object) -> None:
        """Runs in the main thread, once it is back in Python."""
        self._demands += number in DEMANDS
        if self._demands > 1 and number in DEMANDS and not self._exits:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_pipe)
        os.write(self._pipe[1], b"\0")  # ends the thread; a fork may have the pipe too
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def _listen(self) -> None:
        demands = 0
        while number := os.read(self._pipe[0], 1)[0]:
            if number not in self._handlers:
                continue
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                leave_closed_terminal()
            demands += number in DEMANDS
            if demands > 1 and number in DEMANDS and self._exits:
                # Not print: the main thread may hold its lock.
                os.write(2, f"jshard: {name} again: exiting\n".encode())
                os._exit(128 + number)
            if self.signal_name is not None:
                continue
            self.signal_name = name
            if not self._alone:
                os.kill(os.getpid(), signal.SIGTERM)
            again = "exits at once" if self._exits else "abandons this step"
            more = f"; a second signal {again}" * (number in DEMANDS)
            message = f"jshard: {name}: {self._reaction}{more}"
            with outliving_terminal():
                show(message, error=True)
