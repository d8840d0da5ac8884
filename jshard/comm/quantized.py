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

    Every device sees the same weights: its own shard, too, is what the others get.

    Args:
      shard: this device's part.
      dim: the sharded dimension.
      dtype: int8, float8_e4m3fn or float8_e5m2.
    """
    values, scales = quantize(shard, dtype)
    # As bits: XLA's CPUs gather float8 as float16, and NCCL refuses it before sm90.
    bits = lax.bitcast_convert_type(values, jnp.int8)
    bits, scales = (lax.all_gather(x, FSDP) for x in (bits, scales))
    parts = jax.vmap(dequantize)(lax.bitcast_convert_type(bits, values.dtype), scales)
    parts = parts.astype(shard.dtype)
    parts = jnp.moveaxis(parts.reshape(-1, *shard.shape), 0, dim)
    shape = list(shard.shape)
    shape[dim] *= parts.shape[dim]
    return parts.reshape(shape)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Scales blocks so that their largest values are the largest of ``dtype``.

    A block with an infinity or a NaN becomes NaN as a whole.

    Returns:
      The values of ``dtype``, flat (n,), and a float32 scale for each block of 256 of
      them, the last one perhaps shorter.
    """
    blocks = _blocks(x.astype(jnp.float32).reshape(-1))
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(blocks), axis=1) / largest
    # Subnormal scales are too coarse to divide by: such a block is zero.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0, scales)
    scaled = blocks / jnp.where(scales == 0, 1, scales)[:, None]
    values = (jnp.round(scaled) if integer else scaled).astype(dtype)
    return values.reshape(-1)[: x.size], scales


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The inverse of ``quantize``: float32 (n,)."""
    blocks = _blocks(values).astype(jnp.float32) * scales[:, None]
    return blocks.reshape(-1)[: values.size]


def _blocks(flat: jax.Array) -> jax.Array:
    """(blocks, 256), filled up with zeros."""
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
