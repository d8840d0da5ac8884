"""A hash of each array of a checkpoint, of the bits that the devices have.

Checksums of files end where a file is read. From there an array goes through the host's
memory and over a bus, so a save records what the devices had, and a restore compares it
with what they have then, on any mesh: a hash does not depend on how an array is split
or padded.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.layout.memory_kinds import on_host as in_host_memory
from jshard.sharding.settings.mesh import names_of, platform
from jshard.sharding.step.replay.bits import (
    WORDS,
    hash_part,
    joined,
    on_host,
    spec_of,
    words_of,
    words_on_host,
)
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.metadata import BITS
from jshard.system.errors import UserError, some_of

_AT_ONCE = 1 << 18  # elements that NumPy hashes, in the cache

Shapes = tuple[tuple[int, ...], ...]


def hashes_of(
    arrays: Mapping[str, jax.Array], shapes: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Returns the hash of each array in the memory of one mesh's devices, by name.

    It is "" if devices that should have copies do not. All processes call it, and get
    the same.

    Args:
      arrays: By name; those in host memory are left out.
      shapes: Their shapes without padding.
    """
    arrays = {name: x for name, x in arrays.items() if not in_host_memory(x)}
    mesh = next(filter(None, map(_mesh_of, arrays.values())), None)
    if mesh is None:
        return {}
    there = {name: _numbers(x) for name, x in arrays.items() if _mesh_of(x) == mesh}
    exact = [
        (*shapes[name], *x.shape[len(shapes[name]) :]) for name, x in there.items()
    ]
    parts = _parts(mesh, [*there.values()], tuple(exact))
    found = {}
    for name, x, of_devices in zip(there, there.values(), parts, strict=True):
        first = _first_copies(mesh, x.sharding, x.shape)
        total = of_devices[sorted({*first})].sum(axis=0, dtype=np.uint32)
        same = np.array_equal(of_devices, of_devices[first])
        found[name] = "".join(f"{word:08x}" for word in total.tolist()) if same else ""
    return found


def check_bits(
    folder: Path,
    loaded: Mapping[str, jax.Array],
    stored: Mapping[str, Mapping[str, Any]],
    read_again: Callable[[str], jax.Array],
) -> None:
    """Compares arrays on the devices with the hashes that their checkpoint has of them.

    Those are left out of which it has none, that are in host memory, or that were read
    as another dtype.

    Args:
      folder: The step's folder.
      loaded: By their stored names.
      stored: What the metadata says of each.
      read_again: Reads one of them once more.

    Raises:
      UserError: An array has other bits.
    """
    known = {
        name: x
        for name, x in loaded.items()
        if BITS in stored[name] and str(x.dtype) == stored[name]["dtype"]
    }
    now = hashes_of(known, {name: stored[name]["shape"] for name in known})
    if not (wrong := [name for name in now if now[name] != stored[name][BITS]]):
        return
    first, *others = wrong
    again = read_again(first)
    right = hashes_of({first: again}, {first: stored[first]["shape"]})
    if right[first] != stored[first][BITS]:
        what = "on the devices than were saved, and so it has when it is read again"
    else:
        what = "on the devices than in its file: a bit changed on the way there"
        if devices := _differing(loaded[first], again):
            what += f", to {some_of(devices, limit=4)}"
    more = f" (and {len(others)} more arrays have)" if others else ""
    raise UserError(f"checkpoint {shown(folder)}: {first} has other bits{more} {what}")


@functools.lru_cache(maxsize=1024)
def _first_copies(mesh: Mesh, sharding: Any, shape: tuple[int, ...]) -> list[int]:
    """Returns, for each place in the mesh, the first that has the same shard."""
    index_of, first = sharding.devices_indices_map(shape), {}
    for place, device in enumerate(mesh.devices.flat):
        first.setdefault(str(index_of[device]), place)
    return [first[str(index_of[device])] for device in mesh.devices.flat]


def _mesh_of(x: jax.Array) -> Mesh | None:
    """Returns the mesh that an array is on, of one device, too; None for others."""
    if isinstance(x.sharding, NamedSharding):
        return x.sharding.mesh  # type: ignore[return-value]  # of a concrete array
    devices = [*x.sharding.device_set]
    return Mesh(np.array(devices), ("device",)) if len(devices) == 1 else None


def _numbers(x: jax.Array) -> jax.Array:
    """Returns an array, or the data of random keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


# What each device has.


def _parts(mesh: Mesh, arrays: Sequence[jax.Array], shapes: Shapes) -> np.ndarray:
    """Returns the parts of hashes: uint32 (arrays, devices, 2), on all processes.

    Devices compute them. CPUs do it with NumPy, which need not be compiled.
    """
    specs = tuple(map(spec_of, arrays))
    if platform(mesh) != "cpu":
        words = _program(mesh, specs, shapes)(*arrays)
    else:
        rows = {device: [] for device in mesh.local_devices}
        for x, exact in zip(arrays, shapes, strict=True):
            for shard in x.addressable_shards:
                starts = [part.start or 0 for part in shard.index or ()]
                part = _with_numpy(np.asarray(shard.data), starts, exact)
                rows[shard.device].append(part)
        split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        own = [jax.device_put(np.reshape(x, (1, -1)), d) for d, x in rows.items()]
        shape = (mesh.size, len(arrays) * WORDS)
        words = jax.make_array_from_single_device_arrays(shape, split, own)
    return on_host(words).reshape(mesh.size, len(arrays), WORDS).swapaxes(0, 1)


def _with_numpy(x: np.ndarray, starts: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """Returns a shard's part of a hash, a cache's content at a time."""
    if x.size <= _AT_ONCE:
        return hash_part(words_on_host(x), starts, shape, np)
    axis = int(np.argmax(x.shape))
    halves, begins = np.array_split(x, 2, axis), [*starts]
    begins[axis] += halves[0].shape[axis]
    return _with_numpy(halves[0], starts, shape) + _with_numpy(halves[1], begins, shape)


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], shapes: Shapes) -> Any:
    """Returns a program from arrays to the parts of their hashes: (devices, words)."""

    def local(*shards: jax.Array) -> jax.Array:
        return joined(list(map(_part, shards, specs, shapes)))

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    )


def _part(shard: jax.Array, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
    starts: list[Any] = [0] * shard.ndim
    for dim, names in enumerate(spec):
        if axes := names_of(names):
            starts[dim] = lax.axis_index(axes) * shard.shape[dim]
    return hash_part(words_of(shard), starts, shape)


def _differing(one: jax.Array, other: jax.Array) -> list[str]:
    """Returns this process's devices whose shards of two arrays differ."""
    shards = (_numbers(x).addressable_shards for x in (one, other))
    return [
        f"device {x.device.id} (process {x.device.process_index})"
        for x, y in zip(*shards, strict=True)
        if np.asarray(x.data).tobytes() != np.asarray(y.data).tobytes()
    ]
