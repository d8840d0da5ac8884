"""Attention of T5: scores that are not scaled, with a bias of relative positions.

Shape suffixes: B batch, Q and K time of queries and of keys, T time of new tokens, S
slots of a cache, D model width, E width of all heads, N heads, H head width.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jshard.inference.generation import kv_cache
from jshard.models.layers import linear
from jshard.models.t5_config import T5Config


def position_buckets(
    queries: int, keys: int, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the class of each relative position, int32 (Q, K).

    Half of the classes are for one distance each, the others for ranges that grow
    exponentially up to ``max_distance`` (section 2.1). A bidirectional side has half of
    all classes for keys after the query; otherwise such keys count as at distance 0.
    """
    distance = np.arange(queries)[:, None] - np.arange(keys)[None, :]
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    # In float32 like the reference code, so that ranges begin at the same distance.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    scale = np.float32(math.log(max_distance / exact))
    far = exact + (ratio / scale * np.float32(buckets - exact)).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return (offset + bucket).astype(np.int32)


class Attention(nnx.Module):
    """Attention to the same text or to another, with scores that are not scaled.

    The initial queries are smaller in turn (``t5.models`` of the reference code).
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        width, inner = config.width, config.num_heads * config.head_width
        self.head_width = config.head_width
        scaled = (width * config.head_width) ** -0.5
        self.q = linear(config, width, inner, rngs, scaled, bias=False)
        self.k = linear(config, width, inner, rngs, width**-0.5, bias=False)
        self.v = linear(config, width, inner, rngs, width**-0.5, bias=False)
        self.out = linear(config, inner, width, rngs, inner**-0.5, bias=False)

    def __call__(
        self,
        x_BQD: jax.Array,
        memory_BKD: jax.Array,
        bias_1NQK: jax.Array | None,
        mask_B1QK: jax.Array | None,
    ) -> jax.Array:
        """Returns the attention output, (B, Q, D).

        Args:
          x_BQD: what the queries come from.
          memory_BKD: what keys and values come from.
          bias_1NQK: added to the scores.
          mask_B1QK: which keys a query attends to; dimensions of size 1 are for all.
        """
        q_BQNH, (k_BKNH, v_BKNH) = self._queries(x_BQD), self.keys(memory_BKD)
        return self._merge(_attend(q_BQNH, k_BKNH, v_BKNH, bias_1NQK, mask_B1QK))

    def decode(
        self,
        x_BTD: jax.Array,
        bias_BNTS: jax.Array,
        positions_BT: jax.Array,
        cache: kv_cache.KVCache,
        layer: jax.Array,
    ) -> tuple[jax.Array, kv_cache.KVCache]:
        """Returns the output of self-attention, and the cache with these tokens."""
        y_BTNH, cache = kv_cache.attend(
            self._queries(x_BTD),
            *self.keys(x_BTD),
            positions_BT,
            cache,
            layer,
            bias_BNTS=bias_BNTS,
            scale=1.0,
        )
        return self._merge(y_BTNH), cache

    def decode_across(
        self,
        x_BTD: jax.Array,
        cache: kv_cache.KVCache,
        layer: jax.Array,
        mask_BS: jax.Array,
    ) -> jax.Array:
        """Returns the output of attention to another text, which is cached."""
        q_BTNH = self._queries(x_BTD)
        y_BTNH = kv_cache.cross_attend(q_BTNH, cache, layer, mask_BS, scale=1.0)
        return self._merge(y_BTNH)

    def keys(self, memory_BKD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values, (B, K, N, H) each."""
        return self._heads(self.k(memory_BKD)), self._heads(self.v(memory_BKD))

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        return self._heads(self.q(x_BTD))

    def _heads(self, x_BTE: jax.Array) -> jax.Array:
        x_BTNH = x_BTE.reshape(*x_BTE.shape[:2], -1, self.head_width)
        return checkpoint_name(x_BTNH, "qkv")

    def _merge(self, y_BTNH: jax.Array) -> jax.Array:
        y_BTE = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
        return self.out(checkpoint_name(y_BTE, "attended"))


def _attend(
    q_BQNH: jax.Array,
    k_BKNH: jax.Array,
    v_BKNH: jax.Array,
    bias_1NQK: jax.Array | None,
    mask_B1QK: jax.Array | None,
) -> jax.Array:
    """Returns attended values (B, Q, N, H); the softmax is in float32 or wider.

    Not ``jshard.nn.dot_product_attention``, for kernels that store no scores have no
    gradient for a bias.
    """
    wide = jnp.promote_types(q_BQNH.dtype, jnp.float32)
    scores_BNQK = jnp.einsum(
        "BQNH,BKNH->BNQK", q_BQNH, k_BKNH, preferred_element_type=wide
    )
    if bias_1NQK is not None:
        scores_BNQK += bias_1NQK
    if mask_B1QK is not None:
        scores_BNQK = jnp.where(mask_B1QK, scores_BNQK, jnp.finfo(wide).min)
    weights_BNQK = jax.nn.softmax(scores_BNQK).astype(v_BKNH.dtype)
    return jnp.einsum("BNQK,BKNH->BQNH", weights_BNQK, v_BKNH)
