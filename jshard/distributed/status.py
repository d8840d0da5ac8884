"""What a worker tells its parent: lines of JSON through a pipe."""

import json
import os
import threading
from typing import Any

STATUS_FD = "JSHARD_STATUS_FD"  # the pipe that the worker writes to
PARENT_FD = "JSHARD_PARENT_FD"  # a pipe that ends when the parent does


def has_parent() -> bool:
    """Whether this process is a worker, with a parent over it."""
    return STATUS_FD in os.environ


def report(**values: Any) -> None:
    """Tells the parent; without one, or with one that is gone, nobody."""
    if not has_parent():
        return
    line = json.dumps(values) + "\n"  # shorter than a pipe's buffer: written as a whole
    try:
        os.write(int(os.environ[STATUS_FD]), line.encode())
    except OSError:  # the parent is gone; `end_with_parent` ends this process
        return


def end_with_parent() -> None:
    """Ends this process when its parent is killed: nothing is left behind."""
    if not has_parent():
        return
    pipe = int(os.environ[PARENT_FD])

    def wait() -> None:
        os.read(pipe, 1)  # nobody writes: it returns when the parent's end closes
        os._exit(1)

    threading.Thread(target=wait, name="jshard-parent", daemon=True).start()
