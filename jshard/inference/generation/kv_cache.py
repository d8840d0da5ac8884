"""Keys and values of earlier tokens, for decoding a token at a time.

A model makes a cache (``KVCache.zeros``) and passes it through its Stack as a part of
the carry, ``(x_BTD, cache, layer)``: each layer calls ``attend`` and returns its
features, the cache and ``layer + 1``. A carry is updated in place.

The decoder of an encoder-decoder has a second cache, of the encoder's output: it is
made once (``KVCache.stacked``), and every token reads all of it (``cross_attend``).

Rows come first, so that a cache is sharded like any batch. The slots of a head follow
each other, so that its keys and values are read as they lie.

Shape suffixes: B batch, L layers, K key-value heads, S slots, H head width, T new
tokens, N heads of queries, G of them for each of keys.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jshard.nn.blockwise_attention import softmax_beside


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

    @classmethod
    def stacked(cls, k_LBSKH: jax.Array, v_LBSKH: jax.Array, dtype: Any) -> "KVCache":
        """Returns a full cache from the keys and values of all layers."""
        order = (1, 0, 3, 2, 4)
        return cls(*(x.transpose(order).astype(dtype) for x in (k_LBSKH, v_LBSKH)))


class LatentCache(NamedTuple):
    """Latents of all layers, of which keys and values are projections (DeepSeek-V2)."""

    latent_BL1SC: jax.Array

    @property
    def slots(self) -> int:
        """How many tokens of a row there is room for."""
        return self.latent_BL1SC.shape[3]

    @classmethod
    def zeros(
        cls, num_layers: int, batch: int, length: int, width: int, dtype: Any
    ) -> "LatentCache":
        """Returns an empty cache with ``length`` slots for each of ``batch`` rows."""
        return cls(jnp.zeros((batch, num_layers, 1, length, width), dtype))


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    positions_BT: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    *,
    bias_BNTS: jax.Array | None = None,
    window: jax.Array | int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks_N: jax.Array | None = None,
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
      bias_BNTS: added to the scores of queries and slots.
      window: a token attends only to the latest ``window`` positions, its own included.
      soft_cap: c in ``c tanh(score / c)``.
      scale: of the scores; by default 1 / sqrt(H).
      sinks_N: the score of one more key of each head, which has no value.

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype, and the cache.

    Raises:
      AssertionError: shapes do not match.
    """
    chex.assert_equal_shape([k_BTKH, v_BTKH])
    chex.assert_equal_shape_prefix([q_BTNH, k_BTKH, positions_BT], 2)
    chex.assert_rank(positions_BT, 2)
    cache = KVCache(
        _write(cache.k_BLKSH, k_BTKH, positions_BT, layer),
        _write(cache.v_BLKSH, v_BTKH, positions_BT, layer),
    )
    behind_BTS = positions_BT[..., None] - jnp.arange(cache.slots)
    seen_BTS = behind_BTS >= 0
    if window is not None:
        seen_BTS &= behind_BTS < window
    options: dict[str, Any] = {"bias_BNTS": bias_BNTS, "sinks_N": sinks_N}
    options |= {"soft_cap": soft_cap, "scale": scale}
    k_BKSH, v_BKSH = (_of_layer(x, layer) for x in cache)
    return _attend(q_BTNH, k_BKSH, v_BKSH, seen_BTS, **options), cache


def attend_to_latents(
    q_BTNC: jax.Array,
    latent_BTC: jax.Array,
    width: int,
    positions_BT: jax.Array,
    cache: LatentCache,
    layer: jax.Array | int,
    *,
    scale: float,
) -> tuple[jax.Array, LatentCache]:
    """Writes new tokens' latents, and attends the tokens to all, as ``attend`` does.

    Args:
      q_BTNC: queries of the new tokens, projected to the latents.
      latent_BTC: their latents, which are the keys of all heads.
      width: the first features of latents, which are the values.
      positions_BT: their positions, integers.
      cache: latents of all layers.
      layer: which of them is this one.
      scale: of the scores.

    Returns:
      The attended values, (B, T, N, ``width``), in the queries' dtype, and the cache.
    """
    new_BT1C = latent_BTC[:, :, None]
    cache = LatentCache(_write(cache.latent_BL1SC, new_BT1C, positions_BT, layer))
    seen_BTS = positions_BT[..., None] >= jnp.arange(cache.slots)
    k_B1SC = _of_layer(cache.latent_BL1SC, layer)
    v_B1SC = k_B1SC[..., :width]
    return _attend(q_BTNC, k_B1SC, v_B1SC, seen_BTS, scale=scale), cache


def cross_attend(
    q_BTNH: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    mask_BS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Attends tokens to the slots of another text, whatever their positions are.

    Args:
      q_BTNH: queries of the tokens.
      cache: keys and values of all layers.
      layer: which of them is this one.
      mask_BS: which slots hold a token, booleans.
      scale: of the scores; by default 1 / sqrt(H).

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype.

    Raises:
      AssertionError: shapes do not match.
    """
    chex.assert_shape(mask_BS, (q_BTNH.shape[0], cache.slots))
    k_BKSH, v_BKSH = (_of_layer(x, layer) for x in cache)
    return _attend(q_BTNH, k_BKSH, v_BKSH, mask_BS[:, None], scale=scale)


def _of_layer(cache_BLKSH: jax.Array, layer: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(cache_BLKSH, layer, axis=1, keepdims=False)


def _attend(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    seen_BTS: jax.Array,
    *,
    bias_BNTS: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Returns the values of the slots that are seen, weighted, (B, T, N, H)."""
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * (H**-0.5 if scale is None else scale)
    scores = jnp.einsum(
        "BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=dtype
    )
    if bias_BNTS is not None:
        scores += bias_BNTS.reshape(scores.shape)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # Not -inf: a row of padding, which sees nothing, would become nan.
    scores = jnp.where(seen_BTS[:, None, None], scores, jnp.finfo(dtype).min)
    weights = softmax_beside(scores, sinks_N).astype(v_BKSH.dtype)
    y_BTKGH = jnp.einsum(
        "BKGTS,BKSH->BTKGH", weights, v_BKSH, preferred_element_type=dtype
    )
    return y_BTKGH.reshape(B, T, N, -1).astype(q_BTNH.dtype)


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
