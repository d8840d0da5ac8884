"""Values in one byte with scales: of blocks of 256, of a tensor, or powers of two.

Weights that are computed with in a wider dtype have a scale per block. This follows
ZeRO++ (Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for
Giant Model Training", section 3.1). Every block of 256 values has its own scale, so an
outlier reduces the precision of its own block only.

Operands of float8 products (``products.py``) have one scale for the tensor, as cuBLASLt
wants it, or one for each 32 values, as cuDNN does on Blackwell.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256  # values that share a scale of four bytes, which adds 1.6 % on the wire


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantizes values in blocks, each with its own scale.

    The scale maps the largest value of a block to the largest of ``dtype``. A block
    with an infinity or a NaN becomes all NaN.

    Returns:
      Values of ``dtype`` (n,), and a float32 scale for each block of 256 of them, of
      which the last may be shorter.
    """
    blocks = _blocks(x.astype(jnp.float32).reshape(-1))
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(blocks), axis=1) / largest
    # A block whose scale would be subnormal becomes zero: such a scale is too coarse.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0, scales)
    scaled = blocks / jnp.where(scales == 0, 1, scales)[:, None]
    values = (jnp.round(scaled) if integer else scaled).astype(dtype)
    return values.reshape(-1)[: x.size], scales


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Reverses ``quantize`` up to rounding; returns float32 (n,)."""
    blocks = _blocks(values).astype(jnp.float32) * scales[:, None]
    return blocks.reshape(-1)[: values.size]


def _blocks(flat: jax.Array) -> jax.Array:
    """Reshapes to (blocks, 256), padded with zeros."""
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


# One scale for a tensor.


def largest(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude in ``x``, a float32 scalar."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def tensor_scale(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scale of tensors with these largest magnitudes, in float32.

    It is the smallest power of two above ``largest`` over the largest value of
    ``dtype``: dividing by it rounds nothing, so all hardware makes the same float8
    values, and bfloat16 holds their products with the scale exactly. With an infinity
    or a NaN the scale is infinite, and the product NaN. It is computed in integers:
    XLA may divide by a constant as it likes.
    """
    most = int(np.float32(jnp.finfo(dtype).max).view(np.int32))
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    bits &= 0x7FFFFFFF  # a NaN may have a sign
    # A fraction below that of the largest value takes the power before.
    biased = (bits - (most & 0x7FFFFF) >> 23) - (most >> 23) + 128
    power = jnp.where(bits >= 0x7F800000, 255, biased)
    scale = lax.bitcast_convert_type(power << 23, jnp.float32)
    return jnp.where(biased < 2, 1, scale)


def to_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x / scale`` in ``dtype``, where the quotients fit.

    The scale is one number, or has ``x``'s dimensions: one for each of equal blocks, as
    float32 or as uint8 (``exponents``).
    """
    if scale.dtype == jnp.uint8:
        scale = power_of_two(scale)
    return (x.astype(jnp.float32) * (1 / spread(scale, x.shape))).astype(dtype)


def spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the scales of equal blocks for each of their values; or one number."""
    for dim in range(scales.ndim):
        scales = jnp.repeat(scales, shape[dim] // scales.shape[dim], axis=dim)
    return scales


# One scale for a block, in eight bits (e8m0).


def exponents(largest: jax.Array) -> jax.Array:
    """Returns the scales of e4m3 blocks with these largest magnitudes, as uint8.

    It is the exponent, plus 127, of the smallest power of two by which all of the block
    fits: ``2 ** ceil(log2(largest / 448))``, as in Mishra et al. 2025
    (arXiv:2506.08027), in integers, which round alike on all hardware. 255 stands for a
    block with an infinity, all of which becomes NaN.
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    bits &= 0x7FFFFFFF  # a NaN may have a sign
    # 448 is 1.75 * 2**8: a larger fraction takes the next power.
    biased = (bits + 0x1FFFFF >> 23) - 8
    infinite = bits >= 0x7F800000
    return jnp.where(infinite, 255, jnp.maximum(biased, 1)).astype(jnp.uint8)


def power_of_two(exponents: jax.Array) -> jax.Array:
    """Returns the float32 scales that uint8 ``exponents`` stand for."""
    return lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)
