"""A process's limits of memory: `ulimit -v`, and what to say where there is none left.

JAX maps more memory than it uses, for threads above all, and XLA's C++ aborts where it
gets none, which cannot be reported. So what can be known is said before.
"""

import errno
import resource

from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

LEAST = 7 * 2**28  # bytes: on two cores 1.5 GiB are too little for any model
ENOUGH = 2**34  # bytes, for the threads of a large host's cores, too
_INSTEAD = (
    "JAX maps more memory than it uses: run `ulimit -v unlimited` before, and limit "
    "memory by a cgroup, if at all"
)
_FAILED = ("can't start new thread", "Cannot allocate memory", "failed to map segment")


def check_address_space() -> None:
    """Warns of a limit of the address space that may be too low for JAX.

    Raises:
      UserError: It is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH:
        return
    text = f"the address space is limited to {format_bytes(limit)} (ulimit -v)"
    if limit < LEAST:
        least = format_bytes(LEAST)
        raise UserError(f"{text}, and a small model takes {least}: {_INSTEAD}")
    text = f"{text}, and XLA aborts where that is too little: {_INSTEAD}"
    show(f"jshard: warning: {text}", error=True)


def lacks_memory(error: BaseException) -> bool:
    """Returns whether an error says that this host, not a device, has no memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError) and any(
        text in str(error) for text in _FAILED
    )


def memory_advice() -> str:
    """Returns what may help where the host has no memory left."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return "this host is out of memory"
    return f"the address space is limited to {format_bytes(limit)}: {_INSTEAD}"
