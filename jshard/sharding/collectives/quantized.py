"""Quantized all-gathers: weights are sent as one byte each, with scales.

A weight that is computed with in a wider dtype is decoded again. Operands of float8
products (``in_float8.py``) stay in float8, or in four bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.float8.scales import dequantize, quantize
from jshard.sharding.settings.mesh import shard_axes


def gather_quantized(
    shard: jax.Array, dim: int, dtype: Any, axes: Any = None
) -> jax.Array:
    """Returns the full parameter, gathered along ``dim`` with values of ``dtype``.

    All devices get the same weights: a device's own shard is quantized, too.

    Args:
      shard: this device's part.
      dim: the sharded dimension.
      dtype: int8, float8_e4m3fn or float8_e5m2; the result has the shard's dtype.
      axes: the mesh axis, or axes, to gather over; by default all that shard.
    """
    values, scales = quantize(shard, dtype)
    # Gathered as int8: XLA:CPU gathers float8 as float16, and NCCL rejects float8
    # before sm90.
    bits = lax.bitcast_convert_type(values, jnp.int8)
    bits, scales = (lax.all_gather(x, axes or shard_axes()) for x in (bits, scales))
    parts = jax.vmap(dequantize)(lax.bitcast_convert_type(bits, values.dtype), scales)
    parts = parts.astype(shard.dtype)
    parts = jnp.moveaxis(parts.reshape(-1, *shard.shape), 0, dim)
    shape = list(shard.shape)
    shape[dim] *= parts.shape[dim]
    return parts.reshape(shape)


class ScaledShard(NamedTuple):
    """A shard that is gathered divided by a scale, in one byte a value or half of one.

    Attributes:
      shard: this device's part of a weight.
      scale: of the tensor, a scalar, or of each block; as ``to_float8`` takes it.
    """

    shard: jax.Array
    scale: jax.Array


def all_gather_values(
    values: jax.Array, dim: int, axes: Any, groups: list[list[int]] | None = None
) -> jax.Array:
    """Returns an array gathered along ``dim`` over axes, or groups in them."""
    bits = values
    if one_byte := values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        bits = lax.bitcast_convert_type(values, jnp.int8)  # for the reason above
    bits = lax.all_gather(bits, axes, axis=dim, axis_index_groups=groups, tiled=True)
    return lax.bitcast_convert_type(bits, values.dtype) if one_byte else bits
