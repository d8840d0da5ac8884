"""What the processes of data loaders leave to the run: its signals, and its end.

PyTorch forks them, so that they begin with the run's handlers of signals; Grain spawns
them. A signal may reach them too, as Ctrl-C in a terminal and a scheduler's SIGTERM do.
The run that it asks to stop needs their rows to finish its step.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_opening = threading.local()


@contextlib.contextmanager
def opening_loader() -> Iterator[None]:
    """What this thread forks within leaves signals to the run.

    The first processes are forked before the run itself listens to signals.
    """
    _opening.now = True
    try:
        yield
    finally:
        _opening.now = False


def _after_fork() -> None:
    if getattr(_opening, "now", False):
        leave_to_run()


os.register_at_fork(after_in_child=_after_fork)


def leave_to_run() -> None:
    """Lets the parent alone answer signals, and makes this process end with it."""
    signal.set_wakeup_fd(-1)  # the run's, after a fork
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_run, name="jshard-run", daemon=True).start()


def _end_with_run() -> None:
    """Waits until the run is gone, as Grain does not, or sends SIGTERM."""
    run = os.getppid()
    while os.getppid() == run:
        told = signal.sigtimedwait({signal.SIGTERM}, 1)
        if told is not None and told.si_pid == run:
            break
    os._exit(0)
