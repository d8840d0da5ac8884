"""MXFP8 products: every 32 values of an operand have a scale of their own.

Blackwell's tensor cores apply such scales themselves (OCP Microscaling Formats, MX,
v1.0). Values are e4m3, gradients too, and scales are powers of two of eight bits
(e8m0), rounded up: the recipe of Mishra et al. 2025, arXiv:2506.08027. Blocks run along
the dimension that a product sums over, another one in each of three products:

    forward    y = x @ w        along inputs
    backward   dx = dy @ w.T    along outputs
               dw = x.T @ dy    along tokens

So activations and gradients are rounded twice. Weights have square blocks of 32 x 32,
which serve both directions: they are gathered once, in one byte, and devices agree on
their scales by the largest exponents of all shards, as a shard may end within a block.

``block_scaled_dot`` is one of cuDNN's products on GPUs. Elsewhere it computes the same
numbers: dequantized values are exact in bfloat16.
"""

import functools
import math
import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives.quantized import exponents, power_of_two, to_float8
from jshard.compat.cudnn_calls import block_scaled_primitive
from jshard.fsdp.scopes import FLOAT8

MXFP8 = "mxfp8"
BLOCK = 32


class Rows(NamedTuple):
    """A matrix with blocks along its rows.

    Attributes:
      values: (rows, depth), float8_e4m3fn.
      scales: (rows, depth / 32), uint8 exponents.
    """

    values: jax.Array
    scales: jax.Array


def in_rows(x: jax.Array) -> Rows:
    """Quantizes a matrix (rows, depth) along its rows."""
    blocks = jnp.abs(x).reshape(x.shape[0], -1, BLOCK)
    scales = exponents(jnp.max(blocks, axis=-1))
    return Rows(to_float8(x, scales, jnp.float8_e4m3fn), scales)


def product(
    equation: str, x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array
) -> jax.Array:
    """Returns ``jnp.einsum(equation, x, weight)``, both operands in MXFP8.

    Args:
      equation: each letter is in two of inputs, weight and outputs; "..." is in inputs
        and outputs.
      x: is quantized here.
      values: the weight's, float8_e4m3fn.
      scales: uint8 exponents of the weight's square blocks (``grid``).
      zeros: like ``values``, in the weight's dtype; take its gradient.
    """
    inputs, kernel, outputs = _letters(equation, x.ndim)
    summed = [c for c in kernel if c in inputs]
    rows = [c for c in inputs if c not in kernel]
    columns = [c for c in kernel if c not in inputs]
    sizes = dict(zip(inputs + kernel, x.shape + values.shape, strict=True))

    def matrix(array: jax.Array, letters: str, first: list, last: list) -> jax.Array:
        array = array.transpose([letters.index(c) for c in first + last])
        return array.reshape(math.prod(array.shape[: len(first)]), -1)

    weight = (matrix(a, kernel, summed, columns) for a in (values, scales, zeros))
    x = x.astype(jnp.result_type(x, zeros))
    y: Any = _product(zeros.dtype, matrix(x, inputs, rows, summed), *weight)
    y = y.reshape([sizes[c] for c in rows + columns])
    return y.transpose([(rows + columns).index(c) for c in outputs])


def _letters(equation: str, ndim: int) -> list[str]:
    """Returns the letters of inputs, weight and outputs, some in place of "..."."""
    inputs = equation.split(",")[0].replace("...", "")
    free = "".join(c for c in string.ascii_letters if c not in equation)
    equation = equation.replace("...", free[: ndim - len(inputs)])
    return equation.replace("->", ",").split(",")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: Any, x: Any, values: Any, scales: Any, zeros: Any) -> jax.Array:
    """Returns x @ w, of (tokens, inputs) and (inputs, outputs)."""
    return _forward(dtype, x, values, scales, zeros)[0]


@jax.named_scope(FLOAT8)
def _forward(dtype, x, values, scales, zeros):
    y = block_scaled_dot(in_rows(x), _of_weight(values.T, scales.T), x.dtype)
    return y, (in_rows(_tokens_last(x)), values, scales)


@jax.named_scope(FLOAT8)
def _backward(dtype, saved, dy):
    x, values, scales = saved
    dx = block_scaled_dot(in_rows(dy), _of_weight(values, scales), dy.dtype)
    dw = block_scaled_dot(x, in_rows(_tokens_last(dy)), dtype)
    return dx, None, None, dw


_product.defvjp(_forward, _backward)


def _tokens_last(x: jax.Array) -> jax.Array:
    """Returns the transpose, with tokens of zeros until they fill blocks."""
    return jnp.pad(x, ((0, -x.shape[0] % BLOCK), (0, 0))).T


def _of_weight(values: jax.Array, scales: jax.Array) -> Rows:
    """Returns square blocks as those of rows."""
    return Rows(values, jnp.repeat(scales, BLOCK, axis=0))


# The product itself.


def _emulated(*operands: jax.Array, dtype: Any) -> jax.Array:
    def dequantized(values: jax.Array, scales: jax.Array) -> jax.Array:
        scales = power_of_two(scales).astype(dtype)
        return values.astype(dtype) * jnp.repeat(scales, BLOCK, axis=1)

    lhs, rhs = dequantized(*operands[:2]), dequantized(*operands[2:])
    return lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())))


_dot = block_scaled_primitive(_emulated)


def block_scaled_dot(lhs: Rows, rhs: Rows, dtype: Any) -> jax.Array:
    """Returns ``lhs @ rhs.T`` in ``dtype``: (rows of lhs, rows of rhs)."""
    return _dot.bind(*lhs, *rhs, dtype=jnp.dtype(dtype))


# The blocks of a weight.


def blocked(ndim: int, over: tuple[int, ...]) -> tuple[int, int]:
    """Returns the dimensions of a weight that its blocks divide, from the end.

    These are the last one of those that a product sums over, and of the others, so that
    a block is square in the matrix that is multiplied, too.
    """
    others = set(range(-ndim, 0)) - set(over)
    return max(over), max(others)


def divide(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Returns whether blocks divide a weight."""
    return all(shape[dim] % BLOCK == 0 for dim in blocked(len(shape), over))


def grid(shape: tuple[int, ...], over: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of a weight's blocks, by dimension."""
    found = list(shape)
    for dim in blocked(len(shape), over):
        found[dim] //= BLOCK
    return tuple(found)
