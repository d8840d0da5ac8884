"""All-gathers of weights in one byte each, scaled a block at a time.

As ZeRO++ does (Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication
for Giant Model Training", section 3.1): every block of 256 values travels with its own
scale, so that one outlier costs its block its precision and no other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.mesh import FSDP

BLOCK = 256  # values that share a scale of four bytes: 1.6 % more on the wire


def is_quantized(dtype: Any) -> bool:
    """Whether values travel scaled in ``dtype``: the types of one byte."""
    return dtype is not None and jnp.dtype(dtype).itemsize == 1


def all_gather(shard: jax.Array, dim: int, dtype: Any) -> jax.Array:
    """Gathers a parameter along ``dim`` by values of ``dtype``; returns its own dtype.

    Args:
      shard: this device's part.
      dim: the sharded dimension.
      dtype: int8, float8_e4m3fn or float8_e5m2.
    """
    values, scales = quantize(shard, dtype)
    values, scales = (lax.all_gather(x, FSDP) for x in (values, scales))
    devices = values.shape[0]
    blocks = values.astype(jnp.float32) * scales
    flat = blocks.reshape(devices, -1)[:, : shard.size].astype(shard.dtype)
    parts = jnp.moveaxis(flat.reshape(devices, *shard.shape), 0, dim)
    shape = list(shard.shape)
    shape[dim] *= devices
    return parts.reshape(shape)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values (blocks, 256) of ``dtype`` and their scales (blocks, 1) in float32."""
    flat = x.astype(jnp.float32).reshape(-1)
    blocks = jnp.pad(flat, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / largest
    scaled = blocks / jnp.where(scales == 0, 1, scales)
    return (jnp.round(scaled) if integer else scaled).astype(dtype), scales
