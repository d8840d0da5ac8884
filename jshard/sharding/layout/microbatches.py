"""A batch in micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp

# (the arrays of a batch, and the index of each micro-batch): (micro-batches, ...) each
Micro = tuple[Any, jax.Array]


def split(batch: Any, number: int) -> Micro:
    """Cuts a device's examples into micro-batches; each has the scalars whole."""

    def cut(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not x.ndim:
            return jnp.broadcast_to(x, (number,))
        return x.reshape(number, x.shape[0] // number, *x.shape[1:])

    return jax.tree.map(cut, batch), jnp.arange(number, dtype=jnp.uint32)


def first_of(micro: Micro) -> Micro:
    """Returns the first micro-batch and its index."""
    return jax.tree.map(lambda x: x[0], micro)
