"""Attention block by block, in plain JAX: memory grows with tokens, not their square.

A block of queries attends to its keys at a time, and the backward computes its scores
again (Rabe & Staats 2021, arXiv:2112.05682). What causality or the window masks for a
whole range of blocks is left out.

Shape suffixes: B batch, T time, S time of the keys, K key-value heads, G query heads of
each, H head width, C queries of a block, I blocks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SCORES = 2**20  # of a head that exist at a time, if blocks are not small (docs/log.md)
_FEWEST = 64  # queries of a block
_RANGES = 16  # of queries, each with the keys that it needs


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores follow from products of queries and keys."""

    scale: float  # what the products are multiplied with
    is_causal: bool = False  # whether position t attends only to positions up to t
    window: int | None = None  # latest positions that t attends to, its own included
    soft_cap: float | None = None  # c in c tanh(score / c)


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    scores: Scores,
    block: int | None = None,
) -> jax.Array:
    """Computes ``softmax(scores) @ v`` per head.

    Sums are in float32 or wider; weights are rounded to the dtype of the values before
    their product.

    Args:
      q_BTNH: queries.
      k_BSKH: keys; each head serves N / K heads of queries.
      v_BSKH: values.
      segments_BT: the segment of each position, which attends only within it; None is
        one segment. Needs T = S.
      scores: scale, mask and soft cap.
      block: the queries of a block; by default as many as there is room for.

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype.
    """
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    dtype, wide = q_BTNH.dtype, jnp.promote_types(q_BTNH.dtype, jnp.float32)
    C = min(T, block or max(_FEWEST, SCORES // S))
    blocks = -(-T // C)
    padding = (0, blocks * C - T)
    q_BTNH = jnp.pad(q_BTNH, ((0, 0), padding, (0, 0), (0, 0)))
    q_IBCKGH = jnp.moveaxis(q_BTNH.reshape(B, blocks, C, K, N // K, H), 1, 0)
    segments_IBC = None
    if segments_BT is not None:
        padded_BT = jnp.pad(segments_BT, ((0, 0), padding), constant_values=-1)
        segments_IBC = jnp.moveaxis(padded_BT.reshape(B, blocks, C), 1, 0)

    def attend(first: int, last: int) -> jax.Array:
        """Returns the values of some blocks of queries, with the keys they need."""
        begin = max(0, first * C - scores.window + 1) if scores.window else 0
        keys = slice(begin, min(S, last * C) if scores.is_causal else S)
        # Wide, so that gradients are summed over blocks in it.
        kv = (k_BSKH[:, keys].astype(wide), v_BSKH[:, keys].astype(wide))
        of_keys_BS = None if segments_BT is None else segments_BT[:, keys]

        @jax.checkpoint
        def one(inputs: Any) -> jax.Array:
            index, q_BCKGH, segments_BC = inputs
            k_BSKH, v_BSKH = (x.astype(dtype) for x in kv)
            scores_BKGCS = jnp.einsum(
                "bckgh,bskh->bkgcs", q_BCKGH, k_BSKH, preferred_element_type=wide
            )
            scores_BKGCS *= scores.scale
            if (cap := scores.soft_cap) is not None:
                scores_BKGCS = cap * jnp.tanh(scores_BKGCS / cap)
            t = index * C + jnp.arange(C)[:, None]
            s = begin + jnp.arange(k_BSKH.shape[1])
            allowed = (t >= s) | (not scores.is_causal)
            if scores.window is not None:
                allowed &= t - s < scores.window
            if segments_BC is not None:
                same_BCS = segments_BC[:, :, None] == of_keys_BS[:, None]
                allowed = allowed & same_BCS[:, None, None]
            least = jnp.finfo(wide).min  # not infinite: padding attends to nothing
            weights = jax.nn.softmax(jnp.where(allowed, scores_BKGCS, least))
            return jnp.einsum(
                "bkgcs,bskh->bckgh",
                weights.astype(dtype),
                v_BSKH,
                preferred_element_type=wide,
            ).astype(dtype)

        some = slice(first, last)
        segments = None if segments_IBC is None else segments_IBC[some]
        return lax.map(one, (jnp.arange(first, last), q_IBCKGH[some], segments))

    step = -(-blocks // _RANGES) if scores.is_causal else blocks
    ranges = [attend(i, min(blocks, i + step)) for i in range(0, blocks, step)]
    out_BICKGH = jnp.moveaxis(jnp.concatenate(ranges), 0, 1)
    return out_BICKGH.reshape(B, blocks * C, N, H)[:, :T]
