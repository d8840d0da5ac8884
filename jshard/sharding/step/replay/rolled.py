"""Moves what a mesh holds to its next devices, each shard as a whole.

The rolled mesh has the same axes, and other devices in each place. What is split over
it is split as before, so that the same step computes the same values there, each on
another device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.cpu.order import in_order
from jshard.sharding.settings.mesh import platform
from jshard.sharding.step.replay.bits import spec_of


def distances(mesh: Mesh) -> list[int]:
    """Returns how far to move for a second and a third computation.

    That is to the next host, where there are several. With two devices there is no
    third: the list has one entry, and none with one.
    """
    devices = [*mesh.devices.flat]
    own = [d for d in devices if d.process_index == devices[0].process_index]
    step = len(own) if len(own) < len(devices) else 1
    found: list[int] = []
    for distance in (step, 2 * step, 1, 2):
        if distance % len(devices) and distance % len(devices) not in found:
            found.append(distance % len(devices))
    return found[:2]


def rolled_mesh(mesh: Mesh, distance: int) -> Mesh:
    """Returns the mesh whose places have the devices ``distance`` further on."""
    devices = np.roll(mesh.devices.reshape(-1), -distance).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def move(tree: Any, mesh: Mesh, distance: int) -> Any:
    """Returns a copy of a tree on ``rolled_mesh(mesh, distance)``.

    Each device sends what it holds to another, and receives as much.

    Args:
      tree: arrays on the mesh, with an integer scalar (a state's step) among them.
      mesh: of all axes that split them.
      distance: how many places each shard moves.
    """
    leaves, structure = jax.tree.flatten(tree)
    specs = tuple(spec_of(x) for x in leaves)
    target = rolled_mesh(mesh, distance)
    moved = _mover(mesh, distance, specs)(tuple(map(_plain, leaves)))
    placed = [_relabelled(*pair, target) for pair in zip(moved, specs, strict=True)]
    pairs = zip(placed, leaves, strict=True)
    return jax.tree.unflatten(structure, [_like(x, leaf) for x, leaf in pairs])


def move_and_free(tree: Any, mesh: Mesh, distance: int) -> Any:
    """Moves a tree as ``move`` does, array by array, each freed where it was.

    So it takes the memory of the largest array beside the tree's.
    """
    leaves, structure = jax.tree.flatten(tree)
    sent = []
    for x in leaves:
        moved, _ = move([x, jnp.int32(0)], mesh, distance)
        sent.append(jax.block_until_ready(moved))
        x.delete()
    return jax.tree.unflatten(structure, sent)


@functools.lru_cache(maxsize=64)
def _mover(mesh: Mesh, distance: int, specs: tuple[PartitionSpec, ...]) -> Any:
    places = range(mesh.size)
    pairs = [(place, (place + distance) % mesh.size) for place in places]

    def local(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(lax.ppermute(x, mesh.axis_names, pairs) for x in leaves)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    return jax.jit(in_order(mapped) if platform(mesh) == "cpu" else mapped)


def _plain(x: jax.Array) -> jax.Array:
    """Returns an array in a dtype that can be sent; bits stay as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
        return lax.bitcast_convert_type(x, jnp.uint8)
    return x


def _like(x: jax.Array, original: jax.Array) -> jax.Array:
    if jnp.issubdtype(original.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(original))
    same = x.dtype == original.dtype
    return x if same else lax.bitcast_convert_type(x, original.dtype)


def _relabelled(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Returns the same buffers as an array on another mesh; nothing is copied."""
    shards = [shard.data for shard in x.addressable_shards]
    place = NamedSharding(mesh, spec)
    return jax.make_array_from_single_device_arrays(x.shape, place, shards)
