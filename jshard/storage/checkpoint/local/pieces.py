"""Which parts of a state each process keeps: the shards of its devices, once each.

Every process derives this for all of them from the abstract state, so that a process
can tell where another's parts are without asking, and from whom to take what it needs.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jshard.sharding.layout.values.transfer import put_parts
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint.metadata import array_name

# The name of an array, and where a shard of it begins and ends along each dimension.
Key: TypeAlias = tuple[str, tuple[tuple[int, int], ...]]

_ALIGNMENT = 64  # bytes
THREADS = max(1, min(16, (os.cpu_count() or 1) // 2))  # that copy or verify shards


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where a file of copies has a shard."""

    start: int  # its first byte
    size: int  # its bytes


@dataclasses.dataclass(frozen=True)
class Division:
    """How a state is divided among processes."""

    # The pieces in the file of each process, in order. First come those that no process
    # of another host has, too.
    files: Sequence[Mapping[Key, Piece]]
    alone: Sequence[int]  # the bytes of these, for each process
    sizes: Sequence[int]  # the bytes of each file
    digest: str  # tells whether two states are divided alike


def divide(state: TrainState, hosts: Sequence[int]) -> Division:
    """Divides a state.

    Args:
      state: Concrete or abstract, with shardings.
      hosts: The host of each process.
    """
    arrays = _raw_arrays(state)
    holders: dict[Key, set[int]] = {}  # the processes that hold a shard
    for name, x in arrays.items():
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            key = name, _bounds(index, x.shape)
            holders.setdefault(key, set()).add(device.process_index)
    there = {key: {hosts[p] for p in held} for key, held in holders.items()}
    own: list[list[Key]] = [[] for _ in hosts]
    for key in sorted(holders, key=lambda key: len(there[key]) > 1):
        for process in holders[key]:
            own[process].append(key)
    files, alone, sizes = [], [], []
    for keys in own:
        pieces, size, unique = {}, 0, 0
        for name, bounds in keys:
            shape = [stop - start for start, stop in bounds]
            count = int(np.prod(shape)) * arrays[name].dtype.itemsize
            pieces[name, bounds] = Piece(size, count)
            size += -(-count // _ALIGNMENT) * _ALIGNMENT
            unique = size if len(there[name, bounds]) == 1 else unique
        files.append(pieces)
        alone.append(unique)
        sizes.append(size)
    types = {name: (x.shape, str(x.dtype)) for name, x in arrays.items()}
    text = json.dumps([types, [list(pieces) for pieces in files], alone])
    return Division(files, alone, sizes, hashlib.sha256(text.encode()).hexdigest()[:16])


@dataclasses.dataclass(frozen=True)
class Holders:
    """The holders of the parts of one step's copy."""

    division: Division
    # For each process, who has a copy of its file, and how many of its bytes.
    copies: Mapping[int, Sequence[tuple[int, int]]]

    def missing(self) -> list[int]:
        """Returns the processes of which something is nowhere.

        Each needs its texts, which its own file alone has, and all its pieces.
        """
        return [process for process in self.copies if not self._is_whole(process)]

    def _is_whole(self, process: int) -> bool:
        if (process, self.division.sizes[process]) in self.copies[process]:
            return True
        keys = self.division.files[process]
        found = all(self.source(process, key) for key in keys)
        return found and bool(self.copies[process])

    def source(self, process: int, key: Key) -> tuple[int, int] | None:
        """Returns who has a piece that a process needs, and in whose file."""
        for owner in (process, *self.copies):
            piece = self.division.files[owner].get(key)
            if piece is None:
                continue
            end = piece.start + piece.size
            having = [holder for holder, size in self.copies[owner] if end <= size]
            if having:
                return process if process in having else having[0], owner
        return None

    def sources(self, process: int) -> dict[tuple[int, int], list[Key]]:
        """Returns what a process takes from whom, and from whose files."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key in self.division.files[process]:
            source = self.source(process, key)
            if source is None:
                raise ValueError(f"no process has {key}")
            found.setdefault(source, []).append(key)
        return found


def neighbors(hosts: Sequence[int]) -> list[int | None]:
    """Returns which process of the next host keeps a copy for each; None on one host.

    Args:
      hosts: The host of each process.
    """
    on: dict[int, list[int]] = {}
    for process, host in enumerate(hosts):
        on.setdefault(host, []).append(process)
    order = list(on)
    if len(order) == 1:
        return [None] * len(hosts)
    found: list[int | None] = []
    for process, host in enumerate(hosts):
        there = on[order[(order.index(host) + 1) % len(order)]]
        found.append(there[on[host].index(process) % len(there)])
    return found


def copy_shards(
    state: TrainState,
    pieces: Mapping[Key, Piece],
    write: Callable[[int, np.ndarray], None],
) -> None:
    """Calls `write(start, bytes)` for the shards of this process's devices."""
    shards: dict[Key, jax.Array] = {}
    for name, x in _raw_arrays(state).items():
        for shard in x.addressable_shards:
            shards[name, _bounds(shard.index, x.shape)] = shard.data

    def copy(key: Key) -> None:
        x, piece = shards[key], pieces[key]
        # An array keeps the values that were read from it. So another one is read, of
        # the same buffer.
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
        write(piece.start, np.ascontiguousarray(x).reshape(-1).view(np.uint8))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, pieces))


def assemble(abstract: TrainState, read: Callable[[Key], np.ndarray]) -> TrainState:
    """Returns a state on the devices of ``abstract``.

    Args:
      abstract: The state to make.
      read: Returns the bytes of a shard, which are not changed afterwards.
    """
    raw = _raw_arrays(abstract)

    def make(path: tuple, leaf: Any) -> jax.Array:
        name = array_name(path)
        like = raw[name]

        def part_at(index: tuple) -> np.ndarray:
            bounds = _bounds(index, like.shape)
            shape = [stop - start for start, stop in bounds]
            # A copy for each device, because a CPU device's array may alias it.
            return read((name, bounds)).view(like.dtype).reshape(shape).copy()

        made = put_parts(part_at, like)
        if like is leaf:
            return made
        generator = jax.random.key_impl(jnp.empty((), leaf.dtype))
        return jax.random.wrap_key_data(made, impl=generator)

    return jax.tree_util.tree_map_with_path(make, abstract)


def _raw_arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state by name; of random keys, the numbers in them."""

    def raw(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        if isinstance(x, jax.Array):
            return jax.random.key_data(x)
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {array_name(path): raw(x) for path, x in leaves}


def _bounds(index: tuple, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns a shard's slices as numbers; a slice may leave them out."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
