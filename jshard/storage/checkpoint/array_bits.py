"""A hash of each array of a checkpoint, of the bits that the devices have.

Checksums of files end where a file is read. From there an array goes through the host's
memory and over a bus, so a save records what the devices had, and a restore compares it
with what they have then, on any mesh: a hash does not depend on how an array is split
or padded.

It is the sum of an array's words of up to 32 bits, each times twice its place plus one,
modulo 2**64. One flipped bit always changes it, and so do any two of fewer than 2**31
words.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.layout.memory_kinds import on_host as in_host_memory
from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.mesh import names_of, platform
from jshard.sharding.step.replay.bits import on_host, spec_of, words_of
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.manifest import THREADS
from jshard.storage.checkpoint.metadata import BITS
from jshard.system.errors import UserError, some_of

Shapes = tuple[tuple[int, ...], ...]


@own_mesh()
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
    exact = [(*shapes[k], *x.shape[len(shapes[k]) :]) for k, x in there.items()]
    parts = _parts(mesh, [*there.values()], tuple(exact))
    found = {}
    for name, x, of_devices in zip(there, there.values(), parts, strict=True):
        first = _first_copies(mesh, x.sharding, x.shape)
        same = np.array_equal(of_devices, of_devices[first])
        total = of_devices[sorted({*first})].sum(dtype=np.uint64)
        found[name] = f"{total:016x}" if same else ""
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
    """Returns the parts of hashes: uint64 (arrays, devices), on all processes.

    Devices compute them. CPUs do it with NumPy, which need not be compiled.
    """
    if platform(mesh) == "cpu":
        words = _with_numpy(mesh, arrays, shapes)
    else:
        with jax.enable_x64(True):
            words = _program(mesh, tuple(map(spec_of, arrays)), shapes)(*arrays)
    return on_host(words).view(np.uint64).T


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], shapes: Shapes) -> Any:
    """Returns a program from arrays to uint32 (devices, 2 arrays), as JAX keeps it."""

    def local(*shards: jax.Array) -> jax.Array:
        parts = jnp.stack(list(map(_part, shards, specs, shapes)))
        return lax.bitcast_convert_type(parts, jnp.uint32).reshape(1, -1)

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    )


def _part(shard: jax.Array, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
    words = words_of(shard).astype(jnp.uint64)
    axes = [names_of(names) for names in (*spec, *[None] * words.ndim)]
    shape = (*shape, *words.shape[len(shape) :])  # with the words of an element
    places, inside = jnp.uint64(0), True
    for dim, size in enumerate(shape):
        place = lax.broadcasted_iota(jnp.uint64, words.shape, dim)
        if axes[dim]:
            first = lax.axis_index(axes[dim]) * words.shape[dim]
            place += first.astype(jnp.uint64)
        places = places * np.uint64(size) + place
        inside &= place < np.uint64(size)
    weighted = words * (places * np.uint64(2) + np.uint64(1))
    return jnp.sum(jnp.where(inside, weighted, np.uint64(0)))


def _with_numpy(mesh: Mesh, arrays: Sequence[jax.Array], shapes: Shapes) -> jax.Array:
    """Returns what ``_program`` computes."""

    def part(device: Any, of_array: int) -> int:
        shards = arrays[of_array].addressable_shards
        shard = next(shard for shard in shards if shard.device == device)
        starts = [index.start or 0 for index in shard.index]
        return _part_with_numpy(np.asarray(shard.data), starts, shapes[of_array])

    rows = []
    with ThreadPoolExecutor(THREADS) as pool:
        for device in mesh.local_devices:
            parts = pool.map(functools.partial(part, device), range(len(arrays)))
            row = np.array([*parts], np.uint64).view(np.uint32)
            rows.append(jax.device_put(row[None], device))
    return jax.make_array_from_single_device_arrays(
        (mesh.size, 2 * len(arrays)),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        rows,
    )


def _part_with_numpy(
    x: np.ndarray, starts: Sequence[int], shape: tuple[int, ...]
) -> int:
    """Returns what ``_part`` computes of a shard, by sums of its rows and columns."""
    if not shape:
        x, starts, shape = x.reshape(1), (0,), (1,)
    ends = np.subtract(shape, starts)
    x = np.ascontiguousarray(x[tuple(slice(0, max(0, end)) for end in ends.tolist())])
    if not x.size:
        return 0
    words = x.view(f"uint{8 * min(x.dtype.itemsize, 4)}")
    words = words.reshape(-1, words.shape[-1])
    if (bits := jax.dtypes.itemsize_bits(x.dtype)) < 8:
        words = words & np.uint8(2**bits - 1)
    places = np.zeros(1, np.uint64)  # of rows
    for length, start, size in zip(x.shape[:-1], starts, shape, strict=False):
        along = np.arange(start, start + length, dtype=np.uint64)
        places = (places[:, None] * np.uint64(size) + along).ravel()
    of_element = words.shape[1] // x.shape[-1]
    first = starts[-1] * of_element
    columns = np.arange(first, first + words.shape[1], dtype=np.uint64)
    of_rows = words.sum(axis=1, dtype=np.uint64)
    of_columns = words.sum(axis=0, dtype=np.uint64)
    weighted = int((places * of_rows).sum(dtype=np.uint64)) * shape[-1] * of_element
    weighted += int((columns * of_columns).sum(dtype=np.uint64))
    return (2 * weighted + int(of_rows.sum(dtype=np.uint64))) % 2**64


def _differing(one: jax.Array, other: jax.Array) -> list[str]:
    """Returns this process's devices whose shards of two arrays differ."""
    shards = (_numbers(x).addressable_shards for x in (one, other))
    return [
        f"device {x.device.id} (process {x.device.process_index})"
        for x, y in zip(*shards, strict=True)
        if np.asarray(x.data).tobytes() != np.asarray(y.data).tobytes()
    ]
