"""Attention block by block, in plain JAX: memory grows with tokens, not their square.

The softmax is computed online, over pairs of blocks of queries and keys (Rabe & Staats
2021, arXiv:2112.05682), and the backward computes the scores of each pair again from
their log-sum-exp (Dao 2023, arXiv:2307.08691, section 3.1). Pairs that causality or the
window masks altogether are left out.

Shape suffixes: B batch, T time, S time of the keys, K key-value heads, G query heads of
each, H head width, C queries of a block, D keys of a block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 1024  # tokens; (B, N, 1024, 1024) scores exist at a time (docs/log.md)


@dataclasses.dataclass(frozen=True)
class Scores:
    """How scores follow from products of queries and keys."""

    scale: float  # what the products are multiplied with
    is_causal: bool = False  # whether position t attends only to positions up to t
    window: int | None = None  # latest positions that t attends to, its own included
    soft_cap: float | None = None  # c in c tanh(score / c)

    def capped(self, scores: jax.Array) -> jax.Array:
        """Returns scores with the soft cap."""
        c = self.soft_cap
        return scores if c is None else c * jnp.tanh(scores / c)

    def allowed(self, t: Any, s: Any) -> Any:
        """Returns whether position t attends to s, by causality and window."""
        allowed = (t >= s) | (not self.is_causal)
        return allowed if self.window is None else allowed & (t - s < self.window)


def blockwise_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    scores: Scores,
    block: int = BLOCK,
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
      block: number of tokens of a block.

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype.
    """
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    queries, keys = min(block, T), min(block, S)
    q_BTKGH = _padded(q_BTNH, queries).reshape(B, -1, K, N // K, H)
    k_BSKH, v_BSKH = _padded(k_BSKH, keys), _padded(v_BSKH, keys)
    if segments_BT is not None:
        segments_BT = _padded(segments_BT, queries)
    pairs = _Pairs(scores, T, S, queries, keys)
    out_BTKGH: Any = _attend(pairs, (q_BTKGH, k_BSKH, v_BSKH, segments_BT))
    return out_BTKGH[:, :T].reshape(q_BTNH.shape)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Returns x with its second dimension a multiple of ``block``."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, widths) if widths[1][1] else x


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """The pairs of blocks that are computed."""

    scores: Scores
    T: int  # number of queries, without padding
    S: int  # number of keys, without padding
    queries: int  # of a block
    keys: int  # of a block

    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first query and the first key of each pair, (pairs,) int32."""
        t = np.arange(0, self.T, self.queries)[:, None]
        s = np.arange(0, self.S, self.keys)[None]
        needed = np.full((len(t), s.size), True)
        if self.scores.is_causal:
            needed &= t + self.queries > s
        if self.scores.window is not None:  # the first query and the last key
            needed &= t - (s + self.keys - 1) < self.scores.window
        rows, columns = np.nonzero(needed)
        starts = (rows * self.queries, columns * self.keys)
        return starts[0].astype(np.int32), starts[1].astype(np.int32)

    def products(
        self, q_BCKGH: jax.Array, k_BDKH: jax.Array, start: Any, segments: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the scores of a pair, (B, K, G, C, D), and which of them count.

        Args:
          q_BCKGH: queries of the pair.
          k_BDKH: keys of the pair.
          start: position of its first query and of its first key.
          segments: those of its queries and of its keys, or None.
        """
        product = _product("bckgh,bdkh->bkgcd", q_BCKGH, k_BDKH)
        t = start[0] + jnp.arange(self.queries)[:, None]
        s = start[1] + jnp.arange(self.keys)[None]
        counts = self.scores.allowed(t, s) & (s < self.S)
        if segments is not None:
            of_queries_BC, of_keys_BD = segments
            same_BCD = of_queries_BC[:, :, None] == of_keys_BD[:, None]
            counts = counts & same_BCD[:, None, None]
        return self.scores.capped(product * self.scores.scale), counts


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=_wide(a.dtype))


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _block(x: jax.Array, start: Any, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: jax.Array, block: jax.Array, start: Any, axis: int = 1) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, block, start, axis)


def _full(like: jax.Array, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    """Returns a constant in the wide dtype of ``like``."""
    return jnp.full(shape, value, _wide(like.dtype))


def _of_pair(pairs: _Pairs, start: Any, inputs: Any) -> Any:
    """Returns a pair's queries, keys and values, and segments."""
    (t, s), (q_BTKGH, *kv, segments_BT) = start, inputs
    q_BCKGH = _block(q_BTKGH, t, pairs.queries)
    k_BDKH, v_BDKH = (_block(x, s, pairs.keys) for x in kv)
    segments = None
    if segments_BT is not None:
        segments = (
            _block(segments_BT, t, pairs.queries),
            _block(segments_BT, s, pairs.keys),
        )
    return q_BCKGH, k_BDKH, v_BDKH, segments


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(pairs: _Pairs, inputs: tuple) -> jax.Array:
    return _forward(pairs, inputs)[0]


def _forward(pairs: _Pairs, inputs: tuple) -> Any:
    q_BTKGH, *_ = inputs
    B, T, K, G, H = q_BTKGH.shape
    axis = 3  # of queries, in (B, K, G, T, ...)

    def step(state: Any, start: Any) -> Any:
        sums_BKGTH, most_BKGT, total_BKGT = state
        q, k, v, segments = _of_pair(pairs, start, inputs)
        scores, counts = pairs.products(q, k, start, segments)
        before = _block(most_BKGT, start[0], pairs.queries, axis)
        scores = jnp.where(counts, scores, -jnp.inf)
        most = jnp.maximum(before, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - most[..., None])
        kept = jnp.exp(before - most)
        total = _block(total_BKGT, start[0], pairs.queries, axis) * kept
        total += jnp.sum(weights, axis=-1)
        sums = _block(sums_BKGTH, start[0], pairs.queries, axis) * kept[..., None]
        sums += _product("bkgcd,bdkh->bkgch", weights.astype(v.dtype), v)
        new = zip(state, (sums, most, total), strict=True)
        return tuple(_put(x, y, start[0], axis) for x, y in new), None

    # Not infinite: a block of keys may hold none that a query attends to.
    least = float(jnp.finfo(_wide(q_BTKGH.dtype)).min)
    state = (
        _full(q_BTKGH, (B, K, G, T, H)),
        _full(q_BTKGH, (B, K, G, T), least),
        _full(q_BTKGH, (B, K, G, T)),
    )
    (sums_BKGTH, most_BKGT, total_BKGT), _ = lax.scan(step, state, pairs.starts())
    total_BKGT = jnp.where(total_BKGT == 0, 1, total_BKGT)  # only in the padding
    out_BTKGH = jnp.moveaxis(sums_BKGTH / total_BKGT[..., None], 3, 1)
    out_BTKGH = out_BTKGH.astype(q_BTKGH.dtype)
    norm_BKGT = most_BKGT + jnp.log(total_BKGT)
    return out_BTKGH, (inputs, out_BTKGH, norm_BKGT)


def _backward(pairs: _Pairs, saved: Any, grad_BTKGH: jax.Array) -> Any:
    inputs, out_BTKGH, norm_BKGT = saved
    wide, cap = _wide(out_BTKGH.dtype), pairs.scores.soft_cap
    # The sum over keys of weight * its gradient.
    mean_BKGT = jnp.einsum(
        "btkgh,btkgh->bkgt", out_BTKGH.astype(wide), grad_BTKGH.astype(wide)
    )

    def step(state: Any, start: Any) -> Any:
        q, k, v, segments = _of_pair(pairs, start, inputs)
        t, s = start
        grad = _block(grad_BTKGH, t, pairs.queries)
        norm, mean = (
            _block(x, t, pairs.queries, 3)[..., None] for x in (norm_BKGT, mean_BKGT)
        )
        scores, counts = pairs.products(q, k, start, segments)
        weights = jnp.where(counts, jnp.exp(scores - norm), 0)
        of_weights = _product("bckgh,bdkh->bkgcd", grad, v)
        of_scores = weights * (of_weights - mean) * pairs.scores.scale
        if cap is not None:  # the derivative of tanh
            of_scores *= 1 - (scores / cap) ** 2
        of_scores = of_scores.astype(q.dtype)
        of_q = _product("bkgcd,bdkh->bckgh", of_scores, k)
        of_k = _product("bkgcd,bckgh->bdkh", of_scores, q)
        of_v = _product("bkgcd,bckgh->bdkh", weights.astype(v.dtype), grad)
        places = zip(state, (of_q, of_k, of_v), (t, s, s), strict=True)
        return tuple(
            _put(x, _block(x, i, y.shape[1]) + y, i) for x, y, i in places
        ), None

    state = tuple(_full(x, x.shape) for x in inputs[:3])
    grads, _ = lax.scan(step, state, pairs.starts())
    grads = (g.astype(x.dtype) for g, x in zip(grads, inputs[:3], strict=True))
    return ((*grads, None),)


_attend.defvjp(_forward, _backward)
