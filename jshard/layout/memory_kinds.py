"""Pinned host memory, where arrays of a state may wait."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jshard.compat import host_arrays
from jshard.errors import UserError
from jshard.policy import Policy

HOST = "pinned_host"  # the memory kind


def on_host(x: Any) -> bool:
    """Whether ``x`` (array or tracer) is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: jax.Array) -> jax.Array:
    """A traced array in the device's memory, moved there if it is on the host."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def check_memory(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError where the devices cannot reach pinned host memory."""
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST in kinds:
        return
    has = f"which {device} lacks (it has {', '.join(kinds) or 'none'})"
    if policy.offload is not None:
        raise UserError(
            f"policy.offload={policy.offload!r} needs memory of kind {HOST!r}, {has}; "
            "use offload=None"
        )
    # Devices that are only compiled for say nothing of their memories.
    if kinds and policy.offloads_activations():
        raise UserError(
            f"policy.remat: jshard.Offload needs memory of kind {HOST!r}, {has}; "
            "use jshard.Names"
        )


def typed_as_device(x: jax.Array) -> jax.Array:
    """``x`` where it is, typed as a device's array (``compat.host_arrays``)."""
    return host_arrays.typed_as_device(x) if on_host(x) else x
