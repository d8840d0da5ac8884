"""Limits how many calls of jitted functions are in flight, for CPUs.

Before JAX 0.12, a loop of more than 32 calls that never waits for a result hangs on
CPUs (measured: docs/log/cpus.md). The sources suggest why: XLA:CPU allows 32
programs in flight on each device, and the thread that would start one more waits,
although it belongs to the pool that runs them (``compute_reservation`` in
xla/pjrt/cpu/cpu_client.cc). On GPUs the caller's thread waits, which is harmless.
"""

import collections
from typing import Any

import jax
from jax.core import Tracer

# Calls in flight, over all functions. This is far below 32, because what users compute
# between calls, such as sums of metrics, counts as programs in flight, too.
_AHEAD = 2
_under_way: collections.deque[jax.Array] = collections.deque()


def pace(outputs: Any) -> None:
    """Waits until the call two before the one that returns ``outputs`` is done.

    It counts the calls of all functions.
    """
    arrays = [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
    if not arrays or any(isinstance(x, Tracer) for x in arrays):
        return
    # Wait for the smallest output, which keeps little memory alive. The last of that
    # size is a metric: the state's arrays are donated to the next step.
    _under_way.append(min(reversed(arrays), key=lambda x: x.size))
    while len(_under_way) > _AHEAD:
        before = _under_way.popleft()
        if not before.is_deleted():
            before.block_until_ready()
