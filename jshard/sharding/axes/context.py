"""Sequences that are split over mesh axes: "context", or "context" and "tensor".

Outside of attention a layer treats each token alone, so a device runs it on its part of
the sequence. For attention the devices exchange heads: an all-to-all gives each one
some heads of whole sequences, and a second one brings the results back (DeepSpeed
Ulysses, Jacobs et al. 2023, arXiv:2309.14509, section 3.1). Every device has the same
work under a causal mask, and any kernel of ``dot_product_attention`` does it.

Shape suffixes: B batch, T time of this device, S time of whole sequences, N heads,
K key-value heads, H head width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.settings.mesh import context_size, sequence_axes, split_sequences
from jshard.sharding.settings.scopes import EXCHANGE
from jshard.system.errors import warn


def positions(length: int, dtype: Any = None) -> jax.Array:
    """Returns the positions of a device's ``length`` tokens in whole sequences, (T,).

    They are 0 to length - 1, unless the step splits sequences over "context" or
    "tensor".
    """
    local_T = jnp.arange(length, dtype=dtype)
    if context_size() == 1:
        return local_T
    return (lax.axis_index(sequence_axes()) * length).astype(local_T.dtype) + local_T


def whole_sequences(x_BTD: jax.Array) -> jax.Array:
    """Returns the tokens of all devices that share this device's sequences, (B, S, D).

    This is ``x_BTD`` itself unless the step splits sequences.
    """
    if context_size() == 1:
        return x_BTD
    return lax.all_gather(x_BTD, sequence_axes(), axis=1, tiled=True)


def on_whole_sequences(
    attend: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes ``attend(q, k, v, ids, sinks)`` with some heads of whole sequences.

    Each of n devices takes every n-th part of the heads. Key-value heads are repeated
    until n divides them. If n does not divide the heads of queries, some devices attend
    with heads of zeros.

    Args:
      attend: maps (B, S, N', H) queries, (B, S, K', H) keys and values, (B, S) segment
        ids or None, and (N',) sinks or None, to (B, S, N', H).
      q_BTNH: this device's queries.
      k_BTKH: its keys; each head serves N / K heads of queries.
      v_BTKH: its values.
      segment_ids_BT: the documents of its tokens.
      sinks_N: a number for each head of queries.

    Returns:
      The attended values of this device's tokens, (B, T, N, H).
    """
    n, N, K = context_size(), q_BTNH.shape[2], k_BTKH.shape[2]
    axes = sequence_axes()
    if n == 1:
        return attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)
    # The fewest copies of each key-value head that n divides, and whose groups of
    # queries stay whole.
    group = N // K
    fits = (c for c in range(1, group) if group % c == 0 and K * c % n == 0)
    copies = next(fits, group)
    heads = -(-N // n) * n
    k_BTKH, v_BTKH = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKH))
    if heads > N:
        warn(
            f"attention: {' x '.join(axes)}={n} does not divide the {N} heads, so "
            f"{heads - N} more, of zeros, are computed with them"
        )
        q_BTNH, k_BTKH, v_BTKH = (
            jnp.pad(x, [(0, 0), (0, 0), (0, heads - N), (0, 0)])
            for x in (q_BTNH, k_BTKH, v_BTKH)
        )
    if sinks_N is not None:
        sinks_N = jnp.pad(sinks_N, (0, heads - N))
        sinks_N = lax.dynamic_slice_in_dim(
            sinks_N, lax.axis_index(axes) * (heads // n), heads // n
        )
    with jax.named_scope(EXCHANGE):
        q_BSNH, k_BSKH, v_BSKH = (
            lax.all_to_all(x, axes, 2, 1, tiled=True) for x in (q_BTNH, k_BTKH, v_BTKH)
        )
        segment_ids_BS = segment_ids_BT
        if segment_ids_BT is not None:
            segment_ids_BS = lax.all_gather(segment_ids_BT, axes, axis=1, tiled=True)
    with split_sequences(()):
        y_BSNH = attend(q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, sinks_N)
    with jax.named_scope(EXCHANGE):
        y_BTNH = lax.all_to_all(y_BSNH, axes, 1, 2, tiled=True)
    return y_BTNH[:, :, :N]
