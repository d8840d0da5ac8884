"""Copies arrays from the host to the shards of a mesh, and back."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard.sharding.layout.four_bit.base import (
    decoded,
    decoded_spec,
    encode_layers,
    four_bit_of,
)
from jshard.sharding.layout.memory_kinds import on_device
from jshard.sharding.layout.padding import exact_values, padding_now
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.callers_mesh import check_devices, given_back, own_mesh
from jshard.sharding.settings.state import TrainState
from jshard.system.errors import UserError


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


def put_fields(
    state: TrainState, like: TrainState, fields: Mapping[str, Any]
) -> TrainState:
    """Returns a state with full values, as of ``fetch_exact``, in some fields.

    Raises:
      UserError: the values are not those of the abstract state ``like``, by path.
    """
    known = {x.name for x in dataclasses.fields(like) if not x.metadata.get("static")}
    if unknown := fields.keys() - known:
        names = ", ".join(sorted(known))
        raise UserError(f"fsdp.put: a state has {names}, but no {min(unknown)!r}")
    new = {name: _put_field(name, x, getattr(like, name)) for name, x in fields.items()}
    return dataclasses.replace(state, **new)


def _put_field(field: str, values: Any, like: Any) -> Any:
    def by_path(tree: Any) -> dict[str, Any]:
        flat = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
        return {f"{field}.{name(path)}".rstrip("."): leaf for path, leaf in flat}

    given, leaves = by_path(values), by_path(like)
    for name in sorted(leaves.keys() - given.keys()):
        raise UserError(f"fsdp.put: the values have no {name!r}, which the state has")
    for name in sorted(given.keys() - leaves.keys()):
        raise UserError(f"fsdp.put: the state has no {name!r}, which the values have")
    put = [_put_leaf(name, given[name], leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_variable), put)


def _put_leaf(name: str, value: Any, like: Any) -> Any:
    arrays, types = (jax.tree.leaves(x) for x in (value, jax.eval_shape(_full, like)))
    arrays = [fetch(x) for x in arrays]
    found, wanted = (
        ", ".join(f"{x.dtype}{list(x.shape)}" for x in parts)
        for parts in (arrays, types)
    )
    if found != wanted:
        raise UserError(
            f"fsdp.put: {name!r} is given as {found}, and must be {wanted}, as "
            "fsdp.fetch returns it"
        )
    four_bit = four_bit_of(like) if is_variable(like) else None
    if four_bit is not None:
        (values,), layers = arrays, like.get_value().shape[:-1]
        arrays = [encode_layers(four_bit, layers, lambda index: values[index])]
    return jax.tree.unflatten(
        jax.tree.structure(like), map(_put_typed, arrays, jax.tree.leaves(like))
    )


def _full(leaf: Any) -> Any:
    """Returns what is fetched of an array or variable."""
    if is_variable(leaf):
        leaf = decoded(exact_values(leaf))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, leaf)


def _put_typed(array: np.ndarray, like: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(jnp.empty((), like.dtype))
        return put(jax.random.wrap_key_data(jnp.asarray(array), impl=impl), like)
    return put(array, like)


@own_mesh()
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
    decoded, as shards. On a mesh of Explicit axes that the caller has set, all are
    whole.

    Raises:
      UserError: the caller's mesh has other devices.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def one(leaf: Any) -> Any:
        in_bits = four_bit_of(leaf) is not None
        if padding_now(leaf) is None and not in_bits:
            return leaf
        place = NamedSharding(mesh, decoded_spec(leaf, mesh)) if in_bits else whole
        if isinstance(leaf.get_value(), jax.ShapeDtypeStruct):
            types = jax.eval_shape(_decoded_and_exact, leaf)
            there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            return jax.tree.map(there, types)
        leaf = jax.tree.map(on_device, leaf)
        return jax.jit(_decoded_and_exact, out_shardings=place)(leaf)

    with own_mesh(mesh) as callers:
        read = jax.tree.map(one, tree, is_leaf=is_variable)
        check_devices(read, callers)
        return given_back(read, callers, whole=True)


def _decoded_and_exact(leaf: nnx.Variable) -> nnx.Variable:
    return decoded(exact_values(leaf))


def fetch(x: Any) -> np.ndarray:
    """Returns the full value on the host; for typed random keys, their key data."""
    is_array = isinstance(x, jax.Array)
    if is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if is_array and not x.is_fully_addressable:
        x = jax.device_put(x, jax.memory.Space.Device)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
