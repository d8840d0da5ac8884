"""Keys and values of earlier tokens, for decoding a token at a time.

A model makes a cache (``KVCache.zeros``) and passes it through its Stack as a part of
the carry, ``(x_BTD, cache, layer)``: each layer calls ``attend`` and returns its
features, the cache and ``layer + 1``. A carry is updated in place.

Rows come first, so that a cache is sharded like any batch. The slots of a head follow
each other, so that its keys and values are read as they lie.

Shape suffixes: B batch, L layers, K key-value heads, S slots, H head width, T new
tokens, N heads of queries, G of them for each of keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class KVCache(NamedTuple):
    """Keys and values of all layers; slot s holds those of the token at position s."""

    k_BLKSH: jax.Array
    v_BLKSH: jax.Array

    @property
    def slots(self) -> int:
        """How many tokens of a row there is room for."""
        return self.k_BLKSH.shape[3]

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        batch: int,
        length: int,
        num_kv_heads: int,
        head_width: int,
        dtype: Any,
    ) -> "KVCache":
        """Returns an empty cache with ``length`` slots for each of ``batch`` rows."""
        shape = (batch, num_layers, num_kv_heads, length, head_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    positions_BT: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    *,
    window: jax.Array | int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, KVCache]:
    """Writes new tokens' keys and values, and attends the tokens to the cache.

    A token attends to the slots up to its own position, which must have been written,
    now or before. Its keys and values go to the slot of its position; if there is no
    such slot (padding has position -1) they go nowhere, and the token's result means
    nothing. The softmax is in float32 or wider. Scores of all T x S pairs exist at a
    time: give long prompts in several calls.

    Args:
      q_BTNH: queries of the new tokens.
      k_BTKH: their keys; each head serves N / K heads of queries.
      v_BTKH: their values.
      positions_BT: their positions, integers.
      cache: keys and values of all layers.
      layer: which of them is this one.
      window: a token attends only to the latest ``window`` positions, its own included.
      soft_cap: c in ``c tanh(score / c)``.
      scale: of the scores; by default 1 / sqrt(H).

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype, and the cache.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BTKH.shape[2], cache.slots
    cache = KVCache(
        _write(cache.k_BLKSH, k_BTKH, positions_BT, layer),
        _write(cache.v_BLKSH, v_BTKH, positions_BT, layer),
    )
    k_BKSH, v_BKSH = (
        jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False) for x in cache
    )

    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5 if scale is None else scale)
    scores = jnp.einsum(
        "BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=dtype
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    behind_BTS = positions_BT[..., None] - jnp.arange(S)
    seen_BTS = behind_BTS >= 0
    if window is not None:
        seen_BTS &= behind_BTS < window
    # Not -inf: a row of padding, which sees nothing, would become nan.
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores).astype(v_BKSH.dtype)
    y_BTKGH = jnp.einsum(
        "BKGTS,BKSH->BTKGH", weights, v_BKSH, preferred_element_type=dtype
    )
    return y_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype), cache


def _write(
    cache_BLKSH: jax.Array,
    new_BTKH: jax.Array,
    positions_BT: jax.Array,
    layer: jax.Array | int,
) -> jax.Array:
    B, S = cache_BLKSH.shape[0], cache_BLKSH.shape[3]
    # A negative index would count from the end.
    slots_BT = jnp.where(positions_BT < 0, S, positions_BT)
    rows_B1 = jnp.arange(B)[:, None]
    new_BTKH = new_BTKH.astype(cache_BLKSH.dtype)
    return cache_BLKSH.at[rows_B1, layer, :, slots_BT].set(new_BTKH, mode="drop")
