"""Formats of matrices whose values share a scale in blocks: MXFP8 and NVFP4.

Blackwell's tensor cores apply such scales themselves. MXFP8 (OCP Microscaling Formats,
MX, v1.0) has e4m3 values, gradients too, and for each 32 of them a power of two of
eight bits (e8m0), rounded up: the recipe of Mishra et al. 2025, arXiv:2506.08027.

NVFP4 has values of four bits (e2m1), for each 16 of them a scale in e4m3, and one for
the tensor. The recipe is that of NVIDIA 2025, arXiv:2509.25149: gradients of outputs
are rounded stochastically, which keeps their mean, all else to nearest. Both operands
of the gradient of weights are rotated along tokens by a random Hadamard transform
first, which spreads outliers over a block; it cancels in their product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.float8 import float4
from jshard.sharding.float8.scales import exponents, power_of_two, to_float8

# Of a weight (rows, columns): its values as they were gathered, the scales of its
# square blocks, and the exponent of the tensor's scale, of NVFP4 alone.
Weight = tuple[jax.Array, jax.Array, jax.Array | None]


class Rows(NamedTuple):
    """A matrix (rows, depth) with blocks along its rows.

    Attributes:
      values: (rows, depth), float8_e4m3fn; of NVFP4 uint8, two codes a byte.
      scales: (rows, blocks), uint8: exponents, or the bits of e4m3.
      scale: of the tensor, a float32 scalar; of NVFP4 alone.
    """

    values: jax.Array
    scales: jax.Array
    scale: jax.Array | None = None


class Format(NamedTuple):
    """How the operands of products are made.

    Attributes:
      block: how many values of a row share a scale; the sides of a weight's blocks.
      wire: the dtype in which weights are gathered.
      inputs: makes Rows of a matrix.
      gradients: makes Rows of a gradient of outputs.
      rotated: turns each block of a matrix's rows, before it is quantized.
      weight: makes Rows of a weight; along its rows, or with True along its columns.
    """

    block: int
    wire: Any
    inputs: Callable[[jax.Array], Rows]
    gradients: Callable[[jax.Array], Rows]
    rotated: Callable[[jax.Array], jax.Array]
    weight: Callable[[Weight, bool], Rows]


def _repeated(scales: jax.Array, block: int, columns: bool) -> jax.Array:
    """Returns the scales of square blocks as those of rows, or of columns."""
    return jnp.repeat(scales.T if columns else scales, block, axis=0)


def mxfp8_rows(x: jax.Array) -> Rows:
    """Quantizes a matrix (rows, depth) along its rows."""
    scales = exponents(jnp.max(jnp.abs(x).reshape(x.shape[0], -1, 32), axis=-1))
    return Rows(to_float8(x, scales, jnp.float8_e4m3fn), scales)


def _mxfp8_weight(weight: Weight, columns: bool) -> Rows:
    values, scales, _ = weight
    return Rows(values.T if columns else values, _repeated(scales, 32, columns))


def nvfp4_rows(x: jax.Array, *, stochastic: bool = False) -> Rows:
    """Quantizes a matrix (rows, depth) along its rows."""
    largest = float4.largest(x.reshape(x.shape[0], -1, 16), axis=-1)
    tensor = float4.tensor_exponents(float4.largest(largest))
    scales = float4.block_scales(largest, tensor)
    by = float4.decoded_scales(scales, tensor)
    codes = float4.to_float4(x, by, stochastic=stochastic)
    return Rows(float4.pack(codes), scales, power_of_two(tensor))


def _nvfp4_gradients(dy: jax.Array) -> Rows:
    return nvfp4_rows(dy, stochastic=True)


def _nvfp4_weight(weight: Weight, columns: bool) -> Rows:
    values, scales, tensor = weight
    assert tensor is not None
    # Bytes hold neighbours of one dimension, which need not be that of the products.
    packed, wanted = int(values.shape[0] == scales.shape[0] * 16), 1 - columns
    if packed != wanted:
        values = float4.pack(float4.unpack(values, packed), wanted)
    values = values.T if columns else values
    return Rows(values, _repeated(scales, 16, columns), power_of_two(tensor))


_SIGNS = 0x6CB1  # bits drawn once


def hadamard() -> jax.Array:
    """Returns an orthogonal (16, 16): random signs, then Hadamard's matrix / 4."""
    row, column = (lax.broadcasted_iota(jnp.int32, (16, 16), dim) for dim in (0, 1))
    negative = lax.population_count(row & column) + (_SIGNS >> row)
    return (1 - 2 * (negative & 1)) / 4


def _nvfp4_rotated(x: jax.Array) -> jax.Array:
    # A batch of one: remat="dots" keeps products without batches, and nothing takes it
    # for one with a weight.
    blocks, turn = x.reshape(1, -1, 16), hadamard()[None].astype(x.dtype)
    turned = lax.dot_general(blocks, turn, (((2,), (1,)), ((0,), (0,))))
    return turned.reshape(x.shape)


FORMATS = {
    "mxfp8": Format(
        block=32,
        wire=jnp.dtype(jnp.float8_e4m3fn),
        inputs=mxfp8_rows,
        gradients=mxfp8_rows,
        rotated=lambda x: x,
        weight=_mxfp8_weight,
    ),
    "nvfp4": Format(
        block=16,
        wire=float4.E2M1,
        inputs=nvfp4_rows,
        gradients=_nvfp4_gradients,
        rotated=_nvfp4_rotated,
        weight=_nvfp4_weight,
    ),
}
