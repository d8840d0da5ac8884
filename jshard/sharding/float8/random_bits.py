"""Random bits for stochastic rounding: a hash of each element's position."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Key: TypeAlias = tuple[jax.Array, jax.Array]  # two words of 32 bits


def random_bits(
    key: Key, shape: tuple[int, ...], layer_dims: int = 0, first: Any = 0
) -> jax.Array:
    """Returns uniform uint16 bits, a hash of the key and each element's position.

    They are counter-based (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1,
    2, 3"), so that each device generates those of its shard. ``jax.random`` is too,
    but takes ten times as long to run, and five times as long to compile.

    Of ``layer_dims`` first dimensions, a layer's bits are those of ``fold(key, layer)``
    and its own shape; ``first`` is the layer that the first along dimension 0 is.
    """
    for dim in range(layer_dims):
        start = jnp.uint32(0 if dim else first)
        key = fold(key, start + _positions(shape, dim))
    first, second = key
    index = _index(shape, layer_dims)
    return (_mix(_mix(index + first) ^ second) >> 16).astype(jnp.uint16)


def random_words(own: jax.Array) -> jax.Array:
    """Returns uniform uint32: a hash of each element's position and uint32 of its own.

    It is half as much work as ``random_bits``, for what runs in every product.
    """
    return _mix(_index(own.shape, 0) ^ own * np.uint32(0x9E3779B9))


def _index(shape: tuple[int, ...], layer_dims: int) -> Any:
    """Returns each element's position in the array without its first dimensions."""
    index = jnp.uint32(0)
    for dim in range(layer_dims, len(shape)):
        index = index * np.uint32(shape[dim]) + _positions(shape, dim)
    return index


def _positions(shape: tuple[int, ...], dim: int) -> jax.Array:
    """Returns 0, 1, ... along a dimension, in an array that broadcasts to ``shape``."""
    ones = (1,) * (len(shape) - dim - 1)
    return jnp.arange(shape[dim], dtype=jnp.uint32).reshape(-1, *ones)


def fold(key: Key, number: Any) -> Key:
    """Returns the key of a part: a moment's name, or a layer."""
    first, second = key
    number = jnp.asarray(number, jnp.uint32)
    return _mix(first ^ number), _mix(second + number)


def _mix(x: jax.Array) -> jax.Array:
    """Hashes uint32, "lowbias32" of Wellons 2018, "Prospecting for Hash Functions"."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
