"""Values in four bits with a scale for each block, as NVFP4 has them.

A value is a code: a sign and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6
(e2m1). A block's scale is e4m3, whose range is small, so a tensor has a scale, too:
NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149). Here a
tensor's scale is a power of two, the smallest with which all blocks' scales fit: then
bfloat16 holds values times scales exactly, and a product is rounded once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.sharding.float8.random_bits import random_words
from jshard.sharding.float8.scales import exponents, power_of_two, spread

E2M1 = jnp.dtype(jnp.float4_e2m1fn)
# Not a division: XLA would multiply by this, and NumPy would not.
_SIXTH = np.float32(1 / 6)
_LEAST = np.uint8(127 - 100)  # the exponent of 2**-100: scales stay normal in float32


def largest(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Returns the largest magnitudes along dimensions, in float32, or NaN.

    They are compared as integers: XLA's maximum drops NaN on CPUs, and codes have none.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis), jnp.float32)


def tensor_exponents(largest: jax.Array) -> jax.Array:
    """Returns the scales of tensors with these largest magnitudes (``exponents``)."""
    return jnp.maximum(exponents(largest * _SIXTH), _LEAST)


def block_scales(largest: jax.Array, tensors: jax.Array) -> jax.Array:
    """Returns the scales of blocks with these largest magnitudes, as bits of e4m3.

    A block's largest is 6 with it, or nearly: the scale is rounded to nearest. Bits of
    positive e4m3 are in order as uint8, NaN last.

    Args:
      largest: (..., *blocks).
      tensors: exponents of their tensors' scales, (...).
    """
    by = 1 / _beside(power_of_two(tensors), largest.ndim)
    scales = (largest.astype(jnp.float32) * _SIXTH * by).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(scales, jnp.uint8)


def decoded_scales(bits: jax.Array, tensors: jax.Array | None = None) -> jax.Array:
    """Returns what ``block_scales`` stand for, in float32, times their tensors'."""
    scales = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    if tensors is None:
        return scales
    return scales * _beside(power_of_two(tensors), bits.ndim)


def _beside(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


def to_float4(
    x: jax.Array, scales: jax.Array, *, stochastic: bool = False
) -> jax.Array:
    """Returns the codes of ``x / scales``, uint8, one a byte.

    Magnitudes above the largest become the largest. A tie goes to the even code.

    Args:
      x: the values.
      scales: of equal blocks, in ``x``'s dimensions.
      stochastic: whether a value is rounded up with a probability equal to its
        distance from the magnitude below, so that the mean is the value itself. The
        random bits are a hash of its position and of itself, as bfloat16. Two values
        that are alike are rounded alike only where they have the same place, and a
        place has other values in each step: errors average out, without a stream of
        random numbers that models would have to pass to their products.
    """
    x = x.astype(jnp.float32)
    scales = scales.astype(jnp.float32)
    inverse = spread(jnp.where(scales == 0, 0, 1 / scales), x.shape)
    magnitudes = jnp.abs(x) * inverse
    # From 1 on magnitudes have one bit of mantissa, which counts in steps of 2**22 of
    # a float32's bits. Below they are as far apart as those from 1 to 2.
    small = magnitudes < 1
    raised = jnp.where(small, magnitudes + 1, magnitudes)
    bits = lax.bitcast_convert_type(raised, jnp.uint32)
    if stochastic:
        own = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
        bits += random_words(own.astype(jnp.uint32)) >> 10
    else:
        # The inverse is rounded, so that ties are missed by a bit. bfloat16 has no
        # values as near to one.
        bits = (bits + 4) & np.uint32(2**32 - 8)
        bits += np.uint32(2**21 - 1) + (bits >> 22 & 1)
    codes = (bits >> 22) - jnp.where(small, np.uint32(127 << 1), np.uint32(126 << 1))
    codes = jnp.minimum(codes, 7).astype(jnp.uint8)
    return codes | (jnp.signbit(x).astype(jnp.uint8) << 3)


def from_float4(codes: jax.Array) -> jax.Array:
    """Returns the values of codes, in float32."""
    code = (codes & 7).astype(jnp.float32)
    # Steps between magnitudes are 1/2, 1 and 2.
    value = jnp.maximum(jnp.maximum(code / 2, code - 2), 2 * code - 8)
    return jnp.where(codes >= 8, -value, value)


def pack(codes: jax.Array, dim: int = -1) -> jax.Array:
    """Returns two codes a byte, neighbours along ``dim``, the first in the low bits."""
    dim %= codes.ndim
    shape = list(codes.shape)
    shape[dim : dim + 1] = [-1, 2]
    pairs = codes.reshape(shape)
    first, second = (lax.index_in_dim(pairs, i, dim + 1, False) for i in (0, 1))
    return first | (second << 4)


def unpack(packed: jax.Array, dim: int = -1) -> jax.Array:
    """Reverses ``pack``."""
    dim %= packed.ndim
    shape = list(packed.shape)
    shape[dim] *= 2
    return jnp.stack([packed & 15, packed >> 4], axis=dim + 1).reshape(shape)
