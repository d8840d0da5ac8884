"""Pinned host memory: what of a state waits there, and how a step may name it."""

import dataclasses
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard.errors import UserError
from jshard.mesh import FSDP
from jshard.policy import Policy
from jshard.state import TrainState

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


def shardings(policy: Policy, specs: TrainState, mesh: Any) -> TrainState:
    """The sharding, memory kind included, of each array of a state from its spec.

    Arrays that are sharded go to the host. Replicated ones are small, and stay.
    """

    def put(tree: Any, hosted: bool) -> Any:
        def sharding(spec: PartitionSpec) -> NamedSharding:
            kind = HOST if hosted and FSDP in spec else None
            return NamedSharding(mesh, spec, memory_kind=kind)

        return jax.tree.map(sharding, tree)

    streamed, fetched = policy.offload is not None, policy.offload == "all"
    return dataclasses.replace(
        put(specs, False),
        params=put(specs.params, fetched),
        frozen=put(specs.frozen, fetched),
        opt_state=put(specs.opt_state, streamed),
        ema=put(specs.ema, streamed),
    )


def check_state(policy: Policy, state: TrainState, specs: TrainState, mesh: Any):
    """Raises UserError unless a step's state is in the memories that it expects."""
    places = shardings(policy, specs, mesh)
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        if on_host(x) != (place.memory_kind == HOST):
            raise UserError(
                f"policy.offload is {policy.offload!r}, but the state has arrays in "
                f"{'host' if on_host(x) else 'device'} memory that should not be "
                "there; make (or restore) the state with the same policy"
            )


# In a step's shard_map, parameters in host memory must not have the type of such, or
# their gradients would have it, too, and would be moved there and back.
_in_place = core.Primitive("host_array_as_device_array")
_in_place.def_impl(lambda x: x)
_in_place.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_in_place, lambda ctx, x: [x])


def typed_as_device(x: jax.Array) -> jax.Array:
    """``x`` where it is, in host memory say, with the type of a device's array.

    Only ``jax.device_put(..., jax.memory.Space.Device)`` of it, or of its slices, may
    be computed with.
    """
    return _in_place.bind(x) if on_host(x) else x
