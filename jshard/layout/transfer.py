"""Copies arrays from the host to the shards of a mesh, and back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard.four_bit.base import decoded, decoded_spec, encode_layers, four_bit_of
from jshard.layout.memory_kinds import on_device
from jshard.layout.padding import exact_values, padding_now
from jshard.layout.variables import is_variable


def put(value: Any, like: Any) -> jax.Array:
    """Returns a global array like ``like`` from a full one that every process has.

    Shards are copied one at a time; no compiled program takes the full value.
    """
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        raw = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=like.sharding)
        return jax.random.wrap_key_data(put(data, raw), impl=jax.random.key_impl(value))
    full = value if isinstance(value, jax.Array) else np.asarray(value)
    # Copies, because a CPU device's array may alias the memory of its source.
    return put_parts(lambda index: np.array(full[index], like.dtype), like)


def put_parts(part_at: Callable[[tuple], np.ndarray], like: Any) -> jax.Array:
    """Returns a global array of the parts ``part_at(index)``, each made and then put.

    What a part lacks of its shard is padding, zeros.
    """
    # jax.make_array_from_callback would hold the shards of all devices on the host.
    sharding, shape, shards = like.sharding, like.sharding.shard_shape(like.shape), []
    for device, index in sharding.addressable_devices_indices_map(like.shape).items():
        shard = part_at(index)
        if shard.shape != shape:
            part, shard = shard, np.zeros(shape, like.dtype)
            shard[tuple(map(slice, part.shape))] = part
        place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.block_until_ready(jax.device_put(shard, place)))
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


def put_state(values: nnx.State, like: nnx.State) -> nnx.State:
    """Returns the abstract variables ``like`` filled with ``values``, by path."""
    full = dict(nnx.to_flat_state(values))

    def put_leaf(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return put(full[path], leaf)
        value = full[path].get_raw_value()
        if (four_bit := four_bit_of(leaf)) is not None:
            layers = leaf.get_value().shape[:-1]
            value = encode_layers(four_bit, layers, lambda index: value[index])
        return leaf.copy(jax.tree.map(put, value, leaf.get_raw_value()))

    return nnx.map_state(put_leaf, like)


def fetch_exact(leaf: Any) -> Any:
    """Returns an array, or a variable without its padding, on the host."""
    full = jax.tree.map(fetch, leaf)
    if not is_variable(leaf):
        return full
    full = exact_values(full)
    return full if four_bit_of(full) is None else jax.tree.map(fetch, decoded(full))


def as_read(tree: Any, mesh: Any) -> Any:
    """Returns a tree with the values that models read.

    Variables that were padded are whole on each device, and those in 4 bits are
    decoded, as shards.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def one(leaf: Any) -> Any:
        in_bits = four_bit_of(leaf) is not None
        if padding_now(leaf) is None and not in_bits:
            return leaf
        place = NamedSharding(mesh, decoded_spec(leaf, mesh)) if in_bits else whole
        values = lambda leaf: decoded(exact_values(leaf))
        if isinstance(leaf.get_value(), jax.ShapeDtypeStruct):
            types = jax.eval_shape(values, leaf)
            there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            return jax.tree.map(there, types)
        leaf = jax.tree.map(on_device, leaf)
        return jax.jit(values, out_shardings=place)(leaf)

    return jax.tree.map(one, tree, is_leaf=is_variable)


def fetch(x: Any) -> np.ndarray:
    """Returns the full value on the host; for typed random keys, their key data."""
    is_array = isinstance(x, jax.Array)
    if is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if is_array and not x.is_fully_addressable:
        x = jax.device_put(x, jax.memory.Space.Device)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
