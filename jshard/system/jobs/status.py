"""What a worker reports to its parent: lines of JSON through a pipe."""

import json
import os
import threading
from typing import Any

STATUS_FD = "JSHARD_STATUS_FD"  # the pipe that the worker writes to
PARENT_FD = "JSHARD_PARENT_FD"  # a pipe that closes when the parent ends

PERIOD = 0.5  # seconds between beats
GRACE = 3.0  # seconds that process 0 waits at most for the others to read why it ends
SILENCE = 8.0  # default of watch.silence

# Removed from the environment, as processes that this one starts must not have them.
_status = os.environ.pop(STATUS_FD, None)
_parent = os.environ.pop(PARENT_FD, None)
if _status is not None:
    os.set_blocking(int(_status), False)  # a stopped parent must not stop this process


def has_parent() -> bool:
    """Returns whether this process is a worker below a parent."""
    return _status is not None


def report(**values: Any) -> None:
    """Sends values to the parent, if there is one."""
    if _status is None:
        return
    line = json.dumps(values) + "\n"  # shorter than a pipe's buffer, so written at once
    try:
        os.write(int(_status), line.encode())
    except OSError:  # the parent is stopped, or gone: then `end_with_parent` acts
        return


def end_with_parent() -> None:
    """Makes this process end when its parent is killed."""
    if _parent is None:
        return
    pipe = int(_parent)

    def wait() -> None:
        os.read(pipe, 1)  # nobody writes: it returns when the parent's end closes
        os._exit(1)

    threading.Thread(target=wait, name="jshard-parent", daemon=True).start()
