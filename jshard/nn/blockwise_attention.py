"""Attention block by block, in plain JAX: memory grows with tokens, not their square.

A block of queries attends to its keys at a time, and the backward computes its scores
again (Rabe & Staats 2021, arXiv:2112.05682). What causality or the window masks for a
whole range of blocks is left out.

Shape suffixes: B batch, T time, S time of the keys, K key-value heads, G query heads of
each, H head width, C queries of a block.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

SCORES = (
    2**21
)  # of a head, at a time, unless these are of 64 queries (docs/log/models_and_data.md)
_RANGES = 4  # of queries, each with the keys that it needs; more take long to compile


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores follow from products of queries and keys."""

    scale: float  # what the products are multiplied with
    is_causal: bool = False  # whether position t attends only to positions up to t
    window: int | None = None  # latest positions that t attends to, its own included
    soft_cap: float | None = None  # c in c tanh(score / c)
    has_sinks: bool = False  # whether heads have a key without a value


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    scores: Scores,
    block: int | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes ``softmax(scores) @ v`` per head, (B, T, N, H), in the queries' dtype.

    Each key-value head serves N / K heads of queries. Positions attend within segments,
    if there are any (T = S then). Sums are in float32 or wider; weights are rounded to
    the dtype of the values before their product. ``block`` is the queries of a block,
    by default as many as there is room for. ``sinks_N`` are the scores of a key of each
    head that has no value.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    dtype, wide = q_BTNH.dtype, jnp.promote_types(q_BTNH.dtype, jnp.float32)
    C = min(T, block or max(64, SCORES // S))
    blocks, window = -(-T // C), scores.window or T + S

    def in_blocks(x_BT: jax.Array) -> jax.Array:
        padded = jnp.pad(x_BT, [(0, 0), (0, -T % C), *[(0, 0)] * (x_BT.ndim - 2)])
        return jnp.moveaxis(padded.reshape(B, blocks, C, *x_BT.shape[2:]), 1, 0)

    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    inputs = jnp.arange(blocks), *jax.tree.map(in_blocks, (q_BTKGH, segments_BT))

    def attend(some: slice) -> jax.Array:
        """Returns the values of some blocks of queries, (blocks, B, C, K, G, H)."""
        first = max(0, some.start * C - window + 1)
        keys = slice(first, min(S, some.stop * C) if scores.is_causal else S)
        # Wide, so that their gradients are summed over blocks in this dtype.
        kv = [x[:, keys].astype(wide) for x in (k_BSKH, v_BSKH)]

        @jax.checkpoint
        def one(inputs: tuple) -> jax.Array:
            index, q_BCKGH, segments_BC = inputs
            k_BSKH, v_BSKH = (x.astype(dtype) for x in kv)
            product = functools.partial(jnp.einsum, preferred_element_type=wide)
            logits = product("bckgh,bskh->bkgcs", q_BCKGH, k_BSKH) * scores.scale
            if cap := scores.soft_cap:
                logits = cap * jnp.tanh(logits / cap)
            t = index * C + jnp.arange(C)[:, None]
            s = first + jnp.arange(k_BSKH.shape[1])
            counts = ((t >= s) | (not scores.is_causal)) & (t - s < window)
            if segments_BT is not None:
                same_BCS = segments_BC[:, :, None] == segments_BT[:, None, keys]
                counts &= same_BCS[:, None, None]
            # Not infinite: no key may count for a query that fills up the last block.
            logits = jnp.where(counts, logits, jnp.finfo(wide).min)
            weights = softmax_beside(logits, sinks_N).astype(dtype)
            return product("bkgcs,bskh->bckgh", weights, v_BSKH).astype(dtype)

        return lax.map(one, jax.tree.map(lambda x: x[some], inputs))

    size = -(-blocks // _RANGES) if scores.is_causal else blocks
    ranges = [slice(i, min(blocks, i + size)) for i in range(0, blocks, size)]
    out = jnp.moveaxis(jnp.concatenate(list(map(attend, ranges))), 0, 1)
    return out.reshape(B, blocks * C, N, H)[:, :T]


def softmax_beside(
    scores_BKGTS: jax.Array, sinks_N: jax.Array | None = None
) -> jax.Array:
    """Returns the softmax over keys, of which a head may have one more, its sink."""
    if sinks_N is None:
        return jax.nn.softmax(scores_BKGTS)
    _, K, G, *_ = scores_BKGTS.shape
    sinks_KG11 = sinks_N.astype(scores_BKGTS.dtype).reshape(K, G, 1, 1)
    sums = jax.nn.logsumexp(scores_BKGTS, axis=-1, keepdims=True)
    return jnp.exp(scores_BKGTS - jnp.logaddexp(sums, sinks_KG11))
