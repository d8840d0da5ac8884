"""Few calls of jitted functions under way at a time: for CPUs.

On JAX before 0.12 a loop of more than 32 calls that never waits for one hangs on CPUs
(measured: docs/log.md, 2026-11-22). The sources suggest why: XLA:CPU lets a device have
32 programs under way, and the thread that would start one more waits although it is of
the pool that runs them (``compute_reservation`` in xla/pjrt/cpu/cpu_client.cc). On GPUs
it is the caller's thread that waits, which is harmless.
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
        # The smallest, to keep little memory; the last of these, a metric, since the
        # next step takes the state's over.
        _under_way.append(min(reversed(arrays), key=lambda x: x.size))
        while len(_under_way) > _AHEAD:
            before = _under_way.popleft()
            if not before.is_deleted():
                before.block_until_ready()
        return outputs

    def __getattr__(self, name: str) -> Any:
        """Of the jitted function."""
        return getattr(self._jitted, name)
