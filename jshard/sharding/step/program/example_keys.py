"""Random keys whose draws have a row for each example, by its place in the batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl

from jshard.sharding.collectives.microbatch import current_microbatch
from jshard.sharding.layout.values.random_streams import in_batch
from jshard.sharding.settings.mesh import context_size, sequence_axes

_NAME = "examples"
THREEFRY = "threefry2x32"  # the kind of the keys beneath, whose rows vmap leaves alike


def key_of_examples(key: jax.Array, examples: int) -> jax.Array:
    """Returns a key for what a device draws for its examples, in a step.

    It is an ordinary typed key for ``jax.random`` and ``nnx.Rngs``. A draw of the shape
    (examples, ...) has a row for each example: that of the key into which the example's
    index in the global batch is folded, as the masks of ``jshard.Dropout``. So rows do
    not depend on the mesh, nor on the number of micro-batches. A draw of a scalar, or
    of (1, ...) if there are more examples, is the same on all devices.

    Args:
      key: a typed key of THREEFRY, the same on all devices.
      examples: how many of the micro-batch's examples the device has.
    """
    index, number = current_microbatch()
    first = jnp.asarray(index * examples, jnp.uint32)
    own = first + jnp.arange(examples, dtype=jnp.uint32)
    axes = sequence_axes()
    part = jnp.asarray(lax.axis_index(axes) if axes else 0, jnp.uint32)
    words = [jax.random.key_data(key), part[None], in_batch(own, number * examples)]
    kind = _kind(examples, context_size())
    return jax.random.wrap_key_data(jnp.concatenate(words), impl=kind)


def is_of_examples(dtype: Any) -> bool:
    """Returns whether keys of a dtype are those of ``key_of_examples``."""
    return str(dtype) == f"key<{_NAME}>"


@functools.cache
def _kind(examples: int, parts: int) -> Any:
    """Returns what JAX calls a PRNG implementation: how such keys draw, split and fold.

    The data of a key are the two words of its base, the place of the device's ``parts``
    of sequences, and the indices of its examples, which folding and splitting keep.
    """

    def base(data: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(data[:2], impl=THREEFRY)

    def with_base(data: jax.Array, bases: jax.Array) -> jax.Array:
        rest = jnp.broadcast_to(data[2:], (*bases.shape, len(data) - 2))
        return jnp.concatenate([jax.random.key_data(bases), rest], axis=-1)

    def fold_in(data: jax.Array, number: Any) -> jax.Array:
        return with_base(data, jax.random.fold_in(base(data), number))

    def split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return with_base(data, jax.random.split(base(data), shape))

    def draw(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        bits = functools.partial(jax.random.bits, dtype=f"uint{bit_width}")
        if shape[:1] != (examples,):
            return bits(base(data), shape)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(base(data), data[3:])
        if parts == 1 or len(shape) == 1:
            return jax.vmap(lambda key: bits(key, shape[1:]))(keys)
        # Rows of whole sequences, of which the device has a part.
        row, start = (shape[1] * parts, *shape[2:]), data[2].astype(jnp.int32)
        rows = jax.vmap(lambda key: bits(key, row))(keys)
        return lax.dynamic_slice_in_dim(rows, start * shape[1], shape[1], axis=1)

    def seed(number: jax.Array) -> jax.Array:
        raise NotImplementedError("key_of_examples makes such keys from others")

    return define_prng_impl(
        key_shape=(3 + examples,),
        seed=seed,
        split=split,
        random_bits=draw,
        fold_in=fold_in,
        name=_NAME,
        tag=_NAME,
    )
