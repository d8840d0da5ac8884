"""Which parameters are kept in 4 bits, and how a state gets and gives them."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard.sharding.layout.capacity import shard_size
from jshard.sharding.layout.four_bit.codes import BLOCK, FourBit
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.padding import exact_types
from jshard.sharding.layout.specs import shard_dim
from jshard.sharding.layout.variables import own_dtypes
from jshard.sharding.settings.mesh import shard_axes, shards_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import TrainState
from jshard.system.errors import UserError

FOUR_BIT = "four_bit"  # metadata key of a parameter in 4 bits: its FourBit
_KEPT = ("bias", "embedding")  # names of parameters that no product reads


def four_bit_of(variable: Any) -> FourBit | None:
    """Returns how a parameter is kept in 4 bits, or None if it is not."""
    is_variable = isinstance(variable, nnx.Variable)
    return variable.get_metadata(FOUR_BIT, None) if is_variable else None


def in_four_bits(
    state: TrainState, policy: Policy, mesh: Any, layers: Collection[tuple]
) -> TrainState:
    """Returns a new, traced state with the weights in 4 bits that ``policy`` wants so.

    These are the frozen matrices of layers: parameters of two and more dimensions, of
    a multiple of 64 values, other than biases and embeddings. Every device encodes
    whole weights, one layer at a time, so that the bytes do not depend on the mesh.
    ``layers`` are the paths of these, and the state has no padding yet.

    Raises:
      UserError: the policy wants 4 bits, and there are no such weights.
    """
    chosen = policy.everywhere("precision").items()
    wanted = {name: kind for name, x in chosen if (kind := x.base) is not None}
    if not wanted:
        return state
    own, whole = own_dtypes(state, policy), NamedSharding(mesh, PartitionSpec())

    def encode(path: tuple, variable: Any) -> Any:
        kind = policy.precision_at(path, own.get(path)).base
        value = variable.get_value()
        shape = value.shape[layer_dims(variable) :]
        if (
            kind is None
            or not any(path[: len(layer)] == layer for layer in layers)
            or not jnp.issubdtype(value.dtype, jnp.floating)
            or len(shape) < 2
            or math.prod(shape) % BLOCK
            or path[-1] in _KEPT
        ):
            return variable
        four_bit = FourBit(kind, shape, value.dtype.name)
        one = lambda x: four_bit.encode(jax.lax.with_sharding_constraint(x, whole))
        data = _over_leading(one, value, len(shape))
        return variable.copy(data, **{FOUR_BIT: four_bit, "out_sharding": None})

    frozen = nnx.map_state(encode, state.frozen)
    if not any(map(four_bit_of, nnx.to_flat_state(frozen).leaves)):
        name, kind = next(iter(wanted.items()))
        raise UserError(
            f"policy.{name}.base={kind!r} is for frozen matrices of layers, and there "
            "are none; select what is trained with wrt (wrt=nnx.LoRAParam, beside "
            "jshard.nn.add_lora), or leave base out"
        )
    return dataclasses.replace(state, frozen=frozen)


def over_layers(fn: Any, variable: nnx.Variable) -> jax.Array:
    """Maps ``fn`` over a parameter's layers, one at a time, without their 4 bits."""
    value, four_bit = variable.get_value(), four_bit_of(variable)
    if four_bit is None:
        return _over_leading(fn, value, value.ndim - layer_dims(variable))
    return _over_leading(lambda data: fn(four_bit.decode(data)), value, 1)


def _over_leading(fn: Any, stacked: jax.Array, ndim: int) -> jax.Array:
    """Maps ``fn`` over all but the last ``ndim`` dimensions, one layer at a time."""
    layers, one = stacked.shape[:-ndim], stacked.shape[-ndim:]
    done = jax.lax.map(fn, stacked.reshape(-1, *one))
    return done.reshape(*layers, *done.shape[1:])


def encode_layers(
    four_bit: FourBit, layers: tuple[int, ...], layer_at: Callable[[tuple], Any]
) -> np.ndarray:
    """Returns the bytes of a weight on the host, (*layers, bytes of one layer).

    ``layer_at(index)`` returns a layer; one exists at a time.
    """
    data = np.empty((*layers, sum(four_bit.parts)), np.uint8)
    encode = jax.jit(four_bit.encode)
    for index in np.ndindex(*layers):
        data[index] = encode(layer_at(index))
    return data


def values_in(variable: nnx.Variable) -> int:
    """Returns how many values a parameter has, without its padding."""
    (exact,) = jax.tree.leaves(exact_types(variable))
    if (four_bit := four_bit_of(variable)) is None:
        return exact.size
    return exact.size // exact.shape[-1] * math.prod(four_bit.shape)


def values_in_shard(variable: nnx.Variable) -> int:
    """Returns how many values of a parameter one device has, with padding."""
    array = variable.get_value()
    if (four_bit := four_bit_of(variable)) is None:
        return shard_size(array)
    return shard_size(array) * math.prod(four_bit.shape) // sum(four_bit.parts)


def decoded(variable: nnx.Variable) -> nnx.Variable:
    """Returns a parameter, without padding, as what its 4 bits stand for."""
    if four_bit_of(variable) is None:
        return variable
    variable = variable.copy(over_layers(lambda layer: layer, variable))
    variable.del_metadata(FOUR_BIT)
    return variable


def decoded_spec(variable: nnx.Variable, mesh: Any) -> PartitionSpec:
    """Returns how the values of a parameter in 4 bits are sharded where they exist."""
    four_bit = four_bit_of(variable)
    assert four_bit is not None
    dim = shard_dim(four_bit.shape, shards_of(mesh))
    axes: list[Any] = [None] * (layer_dims(variable) + len(four_bit.shape))
    if dim is not None:
        axes[dim] = shard_axes(mesh)
    return PartitionSpec(*axes)
