"""What a worker tells its parent: lines of JSON through a pipe."""

import json
import os
import threading
from typing import Any

STATUS_FD = "JSHARD_STATUS_FD"  # the pipe that the worker writes to
PARENT_FD = "JSHARD_PARENT_FD"  # a pipe that ends when the parent does


# Not for the processes that this one starts.
_status = os.environ.pop(STATUS_FD, None)
_parent = os.environ.pop(PARENT_FD, None)
if _status is not None:
    os.set_blocking(int(_status), False)  # a stopped parent must not stop this process


def has_parent() -> bool:
    """Whether this process is a worker, with a parent over it."""
    return _status is not None


def report(**values: Any) -> None:
    """Tells the parent; without one, or with one that is gone, nobody."""
    if _status is None:
        return
    line = json.dumps(values) + "\n"  # shorter than a pipe's buffer: written as a whole
    try:
        os.write(int(_status), line.encode())
    except OSError:  # it is gone, and `end_with_parent` ends this process; or stopped
        return


def end_with_parent() -> None:
    """Ends this process when its parent is killed: nothing is left behind."""
    if _parent is None:
        return
    pipe = int(_parent)

    def wait() -> None:
        os.read(pipe, 1)  # nobody writes: it returns when the parent's end closes
        os._exit(1)

    threading.Thread(target=wait, name="jshard-parent", daemon=True).start()
