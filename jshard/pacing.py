"""Few calls of jitted functions under way at a time: for CPUs.

XLA:CPU lets a device have 32 programs under way. The thread that would start one more
waits, and it is of the pool that runs those under way: with as few cores as devices all
threads wait, and the process hangs (JAX before 0.12; ``compute_reservation`` in
xla/pjrt/cpu/cpu_client.cc). So a loop must not run far ahead of its devices. GPUs need
none of this: there the thread that waits is the caller's.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

# Calls, of all functions; between them users add up metrics, in programs that count.
_AHEAD = 2
_under_way: collections.deque[jax.Array] = collections.deque()


class Paced:
    """A jitted function that waits for the call before the last one.

    All else (``lower``, ``trace``, ...) is the jitted function's.
    """

    def __init__(self, jitted: Callable[..., Any]):
        """Wraps what ``jax.jit`` returns."""
        self._jitted = jitted
        functools.update_wrapper(self, jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it."""
        outputs = self._jitted(*args, **kwargs)
        arrays = [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
        if not arrays or any(isinstance(x, Tracer) for x in arrays):
            return outputs
        # The smallest, to keep no memory; the last of these, a metric, since the next
        # step takes the state's over.
        _under_way.append(min(reversed(arrays), key=lambda x: x.size))
        while len(_under_way) > _AHEAD:
            before = _under_way.popleft()
            if not before.is_deleted():
                before.block_until_ready()
        return outputs

    def __getattr__(self, name: str) -> Any:
        """Of the jitted function."""
        return getattr(self._jitted, name)
