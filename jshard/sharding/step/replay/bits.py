"""A 64-bit hash of an array's bits, computed where the array is.

It is a sum of mixed words in wrapping integers, whose order does not matter: every
compiler and device gets the same one. Another value in one element, at least, always
gives another hash, for mixing can be reversed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

WORDS = 2  # of 32 bits, as JAX has no others by default
# Of each word of the hash: an odd step, so that each place has a number of its own, and
# where these begin.
_NUMBERED = ((0x9E3779B1, 0x2545F491), (0x85EBCA77, 0x1B873593))


def hash_bits(x: jax.Array, layers: int = 0) -> jax.Array:
    """Returns the hash of an array (*layers, ...), as uint32 (*layers, 2).

    Args:
      x: an array of any dtype, or of random keys.
      layers: how many leading dimensions have a hash for each entry.
    """
    words = words_of(x).reshape(*x.shape[:layers], -1)
    places = lax.broadcasted_iota(jnp.uint32, words.shape, layers)
    hashes = [
        jnp.sum(_mixed(words ^ (places * step + first)), axis=-1, dtype=jnp.uint32)
        for step, first in np.array(_NUMBERED, np.uint32)
    ]
    return jnp.stack(hashes, axis=-1)


def words_of(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32, of 64-bit numbers two for each."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else None
    bits = bits or jnp.finfo(x.dtype).bits
    kind = jnp.uint32 if bits >= 32 else jnp.dtype(f"uint{bits}")
    return lax.bitcast_convert_type(x, kind).astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """The end of MurmurHash3: each bit changes half of the others."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def hash_shards(leaves: Sequence[jax.Array], layers: Sequence[int]) -> jax.Array:
    """Returns the hashes of what each device has of some arrays; nothing is sent.

    Args:
      leaves: global arrays, all on one mesh.
      layers: of each, as of ``hash_bits``.

    Returns:
      uint32 (devices, words), split over the devices; an array's words follow those of
      the one before.
    """
    specs = tuple(map(spec_of, leaves))
    mesh = next(
        x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)
    )
    return _shard_hasher(mesh, specs, tuple(layers))(*leaves)


@functools.lru_cache(maxsize=8)
def _shard_hasher(mesh: Any, specs: tuple[Any, ...], layers: tuple[int, ...]) -> Any:
    def local(*shards: jax.Array) -> jax.Array:
        return joined([hash_bits(*pair) for pair in zip(shards, layers, strict=True)])

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    )


def joined(hashes: list[jax.Array]) -> jax.Array:
    """Returns hashes of one device as a row (1, words)."""
    return jnp.concatenate([jnp.zeros(0, jnp.uint32), *map(jnp.ravel, hashes)])[None]


def spec_of(x: jax.Array) -> PartitionSpec:
    """Returns how an array is split over its mesh."""
    return getattr(x.sharding, "spec", PartitionSpec())


def on_host(words: jax.Array) -> np.ndarray:
    """Returns hashes of all devices, on each process."""
    if words.is_fully_addressable:
        return np.asarray(words)
    return np.asarray(multihost_utils.process_allgather(words, tiled=True))
