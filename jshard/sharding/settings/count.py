"""Count: a whole number that adds up exactly, where int32 would wrap.

A batch of a large job may have more than 2**31 tokens, and float32 counts to 2**24.
"""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.sharding.settings.precision import at_least_float32

# D: digits, the lowest first.
DIGITS, BITS = 4, 16
BASE = 1 << BITS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """A whole number of up to 62 bits, which ``int`` and ``float`` read.

    Attributes:
      digits_D: (4,) int32, base 2**16. All but the last are from 0 to 2**16 - 1, so
        that a sum of 2**15 of them fits.
    """

    digits_D: jax.Array

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Count):
            return carried(self.digits_D + other.digits_D)
        return self.astype(jnp.result_type(other)) + other

    __radd__ = __add__

    def __int__(self) -> int:
        digits = map(int, np.asarray(self.digits_D))
        return sum(digit << BITS * i for i, digit in enumerate(digits))

    def __float__(self) -> float:
        return float(int(self))

    def astype(self, dtype: Any) -> jax.Array:
        """Returns the number in a floating dtype, rounded."""
        digits = [self.digits_D[i].astype(dtype) for i in range(DIGITS)]
        return functools.reduce(lambda high, low: high * BASE + low, digits[::-1])


def carried(digits_D: jax.Array) -> Count:
    """Returns the Count of digits that were added up, and have grown."""
    digits, carry = [], 0
    for i in range(DIGITS - 1):
        digit = digits_D[i] + carry
        digits.append(digit & BASE - 1)
        carry = digit >> BITS  # rounds down, so a difference borrows
    return Count(jnp.stack([*digits, digits_D[-1] + carry]))


def exact(value: Any) -> Any:
    """Returns a whole number as a Count, and another as at least float32.

    Args:
      value: a scalar; Python's integers may be larger than an int32.
    """
    if isinstance(value, Count):
        return value
    if isinstance(value, numbers.Integral):
        whole = int(value)
        digits = [whole >> BITS * i & BASE - 1 for i in range(DIGITS - 1)]
        return Count(jnp.array([*digits, whole >> BITS * (DIGITS - 1)], jnp.int32))
    x = jnp.asarray(value)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return at_least_float32(x)
    if x.dtype.itemsize < 4:  # a bool, too
        x = x.astype(jnp.int32)
    return Count(jnp.stack([_digit(x, i) for i in range(DIGITS)]))


def _digit(x: jax.Array, i: int) -> jax.Array:
    width = 8 * x.dtype.itemsize
    if BITS * i >= width and jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return jnp.zeros((), jnp.int32)
    # A shift by the width of a number, or more, is not defined.
    digit = x >> min(BITS * i, width - 1)
    return (digit if i == DIGITS - 1 else digit & BASE - 1).astype(jnp.int32)


def add_up(value: Any, axes: tuple[str, ...]) -> Any:
    """Sums a number of either kind over the devices of mesh axes."""
    if not isinstance(value, Count):
        return lax.psum(value, axes)
    fitting = carried(value.digits_D)  # it may be a sum of micro-batches
    return carried(lax.psum(fitting.digits_D, axes))


def sum_of(values: Any) -> Any:
    """Sums numbers of one kind that are stacked along a first dimension.

    A Count keeps its digits as they come, for ``add_up`` to carry.
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), values)


def as_float(value: Any, dtype: Any = None) -> jax.Array:
    """Returns a Count as a float, by default of JAX's widest dtype; others as is."""
    if isinstance(value, Count):
        return value.astype(dtype or jnp.result_type(float))
    return jnp.asarray(value)
