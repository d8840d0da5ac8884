"""Products of matrices with scales in blocks (``formats.py``), and their gradients.

Blocks run along the dimension that a product sums over, another one in each of three
products:

    forward    y = x @ w        along inputs
    backward   dx = dy @ w.T    along outputs
               dw = x.T @ dy    along tokens

So activations and gradients are rounded twice. Weights have square blocks, which serve
both directions: they are gathered once, in one byte or half of one, and devices agree
on their scales by the largest ones of all shards, as a shard may end within a block.

``block_scaled_dot`` is one of cuDNN's products on GPUs. Elsewhere it computes the same
numbers: dequantized values are exact in bfloat16.
"""

import functools
import math
import string
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.float8.float4 import decoded_scales, from_float4, unpack
from jshard.sharding.float8.formats import FORMATS, Format, Rows, Weight
from jshard.sharding.float8.scales import power_of_two
from jshard.sharding.settings.scopes import FLOAT8
from jshard.system.compat.cudnn_calls import block_scaled_primitive


def product(
    equation: str, kind: str, x: jax.Array, weight: Weight, zeros: jax.Array
) -> jax.Array:
    """Returns ``jnp.einsum(equation, x, weight)``, both operands in blocks.

    Args:
      equation: each letter is in two of inputs, weight and outputs; "..." is in inputs
        and outputs.
      kind: the format's name.
      x: is quantized here.
      weight: its values, of its dimensions, the scales of its square blocks (``grid``),
        and the exponent of the tensor's scale.
      zeros: of the weight's shape, in its dtype; take its gradient.
    """
    inputs, kernel, outputs = _letters(equation, x.ndim)
    summed = [c for c in kernel if c in inputs]
    rows = [c for c in inputs if c not in kernel]
    columns = [c for c in kernel if c not in inputs]
    sizes = dict(zip(inputs + kernel, x.shape + zeros.shape, strict=True))

    def matrix(array: jax.Array, letters: str, first: list, last: list) -> jax.Array:
        array = array.transpose([letters.index(c) for c in first + last])
        return array.reshape(math.prod(array.shape[: len(first)]), -1)

    values, scales, zeros = (
        matrix(a, kernel, summed, columns) for a in (*weight[:2], zeros)
    )
    x = matrix(x.astype(jnp.result_type(x, zeros)), inputs, rows, summed)
    y: Any = _product(FORMATS[kind], zeros.dtype, x, (values, scales, weight[2]), zeros)
    y = y.reshape([sizes[c] for c in rows + columns])
    return y.transpose([(rows + columns).index(c) for c in outputs])


def _letters(equation: str, ndim: int) -> list[str]:
    """Returns the letters of inputs, weight and outputs, some in place of "..."."""
    inputs = equation.split(",")[0].replace("...", "")
    free = "".join(c for c in string.ascii_letters if c not in equation)
    equation = equation.replace("...", free[: ndim - len(inputs)])
    return equation.replace("->", ",").split(",")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    format: Format, dtype: Any, x: jax.Array, weight: Weight, zeros: Any
) -> jax.Array:
    """Returns x @ w, of (tokens, inputs) and (inputs, outputs)."""
    return _forward(format, dtype, x, weight, zeros)[0]


@jax.named_scope(FLOAT8)
def _forward(format, dtype, x, weight, zeros):
    y = block_scaled_dot(format.inputs(x), format.weight(weight, True), x.dtype)
    return y, (format.inputs(_along_tokens(format, x)), weight)


@jax.named_scope(FLOAT8)
def _backward(format, dtype, saved, dy):
    x, weight = saved
    of_dy = format.gradients(dy)
    dx = block_scaled_dot(of_dy, format.weight(weight, False), dy.dtype)
    dw = block_scaled_dot(x, format.gradients(_along_tokens(format, dy)), dtype)
    return dx, None, dw


_product.defvjp(_forward, _backward)


def _along_tokens(format: Format, x: jax.Array) -> jax.Array:
    """Returns the transpose, with tokens of zeros until they fill blocks."""
    padded = jnp.pad(x, ((0, -x.shape[0] % format.block), (0, 0)))
    return format.rotated(padded.T)


# The product itself.


def _emulated(*operands: jax.Array, dtype: Any, depth: int) -> jax.Array:
    def dequantized(values: jax.Array, scales: jax.Array) -> jax.Array:
        four_bits = values.dtype == jnp.uint8
        values = from_float4(unpack(values)) if four_bits else values
        scales = decoded_scales(scales) if four_bits else power_of_two(scales)
        blocks = jnp.repeat(scales.astype(dtype), depth // scales.shape[1], axis=1)
        return values.astype(dtype) * blocks

    lhs, rhs = dequantized(*operands[:2]), dequantized(*operands[2:])
    return lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())))


_dot = block_scaled_primitive(_emulated)


def block_scaled_dot(lhs: Rows, rhs: Rows, dtype: Any) -> jax.Array:
    """Returns ``lhs @ rhs.T`` in ``dtype``: (rows of lhs, rows of rhs)."""
    operands, depth = [*lhs[:2], *rhs[:2]], lhs.values.shape[1]
    if lhs.scale is not None and rhs.scale is not None:
        operands, depth = [*operands, lhs.scale * rhs.scale], 2 * depth
    return _dot.bind(*operands, dtype=jnp.dtype(dtype), depth=depth)


# The blocks of a weight.


def blocked(ndim: int, over: tuple[int, ...]) -> tuple[int, int]:
    """Returns the dimensions of a weight that its blocks divide, from the end.

    These are the last one of those that a product sums over, and of the others, so that
    a block is square in the matrix that is multiplied, too.
    """
    others = set(range(-ndim, 0)) - set(over)
    return max(over), max(others)


def divide(shape: tuple[int, ...], over: tuple[int, ...], block: int) -> bool:
    """Returns whether blocks of ``block`` x ``block`` divide a weight."""
    return all(shape[dim] % block == 0 for dim in blocked(len(shape), over))


def grid(shape: tuple[int, ...], over: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Returns the numbers of a weight's blocks, by dimension."""
    found = list(shape)
    for dim in blocked(len(shape), over):
        found[dim] //= block
    return tuple(found)


def packed(ndim: int, over: tuple[int, ...], dim: int | None) -> int:
    """Returns the dimension along which a weight has two values of four bits a byte.

    It is one that blocks divide, and not ``dim``, which is sharded. The one that
    products sum over is the better: the forward reads such bytes as they are.
    """
    first, second = blocked(ndim, over)
    return second if first == dim else first
