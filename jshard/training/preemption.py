"""Signals that end a run: save first, then stop."""

import os
import signal
import sys
import threading
from typing import Self

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Hears SIGTERM and SIGINT (Ctrl-C) while a run trains; a context manager.

    The first one is a request: the run finishes its step, saves and stops. A second
    one ends the process, with exit code 143 or 130. Both are heard at once, even while
    the main thread waits for the compiler or the devices. A signal that is ignored, as
    Ctrl-C is by a shell's background jobs, stays ignored.

    With several processes a SIGTERM to any of them is a request to all: JAX hears it
    in C++, and within about a second the processes agree on a step to stop after. A
    Python handler of SIGTERM would silently replace JAX's, so there is none, and:

    - The first Ctrl-C becomes a SIGTERM; the second ends that process.
    - A second SIGTERM does nothing. A process that waits in vain for one that died
      ends by SIGKILL, or by Ctrl-C twice.
    - Nobody else may handle SIGTERM after `jax.distributed.initialize`.

    Attributes:
      signal_name: The signal that was the request; None before there is one.
    """

    def __init__(self, *, saves: bool = True) -> None:
        """Prepares to listen.

        Args:
          saves: Whether the run can save its state; for what the user is told.
        """
        self.signal_name: str | None = None
        self._does = "finishing the step and saving" if saves else "finishing the step"
        self._alone = jax.process_count() == 1

    def requested(self, step: int) -> bool:
        """Returns whether the run shall save and stop after this step.

        Args:
          step: The step that was just taken. With several processes all of them ask
            after every step; the answer is True after one step, the same for all.
        """
        if self._alone:
            return self.signal_name is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.signal_name = self.signal_name or "SIGTERM"
        return True

    def __enter__(self) -> Self:
        """Starts to listen, where Python allows it: in the main thread."""
        self._handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        numbers = [signal.SIGINT, signal.SIGTERM] if self._alone else [signal.SIGINT]
        handlers = {number: signal.getsignal(number) for number in numbers}
        self._handlers = {
            number: handler
            for number, handler in handlers.items()
            if handler not in (signal.SIG_IGN, None)  # None: not Python's to give back
        }
        # A Python handler waits until the main thread is back in Python. What it
        # writes to this pipe reaches another thread at once.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1])
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        for number in self._handlers:
            signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *exception: object) -> None:
        """Gives the signals back to those who handled them before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_pipe)
        os.close(self._pipe[1])  # which ends the thread
        self._thread.join()
        os.close(self._pipe[0])

    def _listen(self) -> None:
        while number := os.read(self._pipe[0], 1):
            if number[0] not in self._handlers:
                continue
            name = signal.Signals(number[0]).name
            if self.signal_name is not None:
                # Not by print: the main thread may hold what that needs.
                os.write(2, f"jshard: {name} again: exiting\n".encode())
                os._exit(128 + number[0])
            self.signal_name = name
            print(
                f"jshard: {name}: {self._does}; once more exits at once",
                file=sys.stderr,
                flush=True,
            )
            if not self._alone:
                os.kill(os.getpid(), signal.SIGTERM)
