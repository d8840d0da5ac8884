"""Packed documents: rows of a batch that hold several, one after the other.

Shape suffixes: B batch, T time, M documents of a row.
"""

import jax
import jax.numpy as jnp


def documents(segment_ids_BT: jax.Array) -> jax.Array:
    """Numbers the documents of each row from 0, runs of equal ids: (B, T) int32."""
    begins = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def starts_and_lengths(
    document_BT: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Returns where documents start and how long they are, -1 for those not there.

    Starts are (B, M + 1), of which the last are -1, and lengths (B, M), both int32, for
    M, the ``most`` documents of a row; others are left out.
    """
    own_BTM = document_BT[:, :, None] == jnp.arange(most)
    length_BM = jnp.sum(own_BTM, axis=1, dtype=jnp.int32)
    start_BM = jnp.cumsum(length_BM, axis=1, dtype=jnp.int32) - length_BM
    start_BM, length_BM = (
        jnp.where(length_BM > 0, x, -1) for x in (start_BM, length_BM)
    )
    return jnp.pad(start_BM, ((0, 0), (0, 1)), constant_values=-1), length_BM
