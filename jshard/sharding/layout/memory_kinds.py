"""Pinned host memory, to which arrays of a state can be offloaded."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jshard.sharding.settings.policy import Policy
from jshard.system.compat.programs import primitives
from jshard.system.errors import UserError

HOST = "pinned_host"  # JAX's name for the memory kind.


def on_host(x: Any) -> bool:
    """Returns whether ``x``, an array or a tracer, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(x: jax.Array) -> jax.Array:
    """Returns a traced array in device memory, moving it there if necessary."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def check_memory(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the policy needs pinned host memory and devices lack it."""
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
    # Devices of a topology that is only compiled for do not report memory kinds.
    if kinds and policy.offloads_activations():
        raise UserError(
            f"policy.remat: jshard.Offload needs memory of kind {HOST!r}, {has}; "
            "use jshard.Names"
        )


def typed_as_device(x: jax.Array) -> jax.Array:
    """Types ``x`` as a device array without moving it (``compat.programs``)."""
    return primitives.typed_as_device(x) if on_host(x) else x
