"""Whether a state fits the memory of the devices, before any of it is allocated."""

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jshard.sharding.layout.memory_kinds import HOST
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

# Where Linux says how much a container may use: control groups of both versions.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_REMEDY = "take a smaller model, a smaller dtype of parameters or moments, or more"


def host_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory of this machine, or of this container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # none, or "max"
            found = min(found, int((groups / name).read_text()))
    return found


def device_limit(devices: Sequence[Any]) -> int:
    """Returns the bytes of the least device's memory; 0 if none says what it has."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return min(filter(None, limits), default=0)


def shard_size(x: Any) -> int:
    """Returns the elements of an array's shard on one device."""
    return math.prod(x.sharding.shard_shape(x.shape))


def shard_bytes(x: Any) -> int:
    """Returns their bytes."""
    return shard_size(x) * x.dtype.itemsize


def state_bytes(state: Any, *, on_host: bool = False) -> int:
    """Returns the bytes of an abstract state, with shardings, for one device.

    With ``on_host``, those in pinned host memory (``Policy.offload``) instead.
    """
    return sum(
        shard_bytes(x)
        for x in jax.tree.leaves(state)
        if (x.sharding.memory_kind == HOST) == on_host
    )


def check_capacity(state: Any, devices: Sequence[Any]) -> None:
    """Raises UserError if a state does not fit the memory, with nothing else in it.

    ``state`` is abstract, with shardings; ``devices`` are those of this process.
    """
    if not devices:
        return
    count, total = len(devices), host_bytes()
    of_device, of_host = state_bytes(state), state_bytes(state, on_host=True)
    if devices[0].platform == "cpu":
        of_host, of_device = of_host + of_device, 0
    each = f"{format_bytes(of_host)} for each of {count} devices"
    if of_host * count > total:
        raise UserError(
            f"the state (parameters, moments) needs {format_bytes(of_host * count)} of "
            f"the host's memory, {each}, and it has {format_bytes(total)}: {_REMEDY} "
            "hosts"
        )
    if 0 < (limit := device_limit(devices)) < of_device:
        raise UserError(
            f"the state (parameters, moments) needs {format_bytes(of_device)} on each "
            f"device, which has {format_bytes(limit)}: {_REMEDY} devices, or keep "
            "the moments in host memory (policy.offload)"
        )
