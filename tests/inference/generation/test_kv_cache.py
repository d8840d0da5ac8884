"""Attention over a cache of keys and values equals attention over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard
from jshard.inference.generation.kv_cache import KVCache, attend, cross_attend

T, N, K, H = 7, 4, 2, 6
LENGTHS = [7, 4, 1]  # of three sequences


def qkv(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    shapes = ((len(LENGTHS), T, heads, H) for heads in (N, K, K))
    return [
        jax.device_put(np.asarray(rng.normal(size=shape), dtype)) for shape in shapes
    ]


@pytest.mark.quick("plain-several", "window-one", "scores-whole")
@pytest.mark.parametrize(
    "parts", [[7], [3, 4], [1] * 7], ids=["whole", "several", "one"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"soft_cap": 2.0, "scale": 0.7}],
    ids=["plain", "window", "scores"],
)
def test_equals_attention_over_whole_sequences(x64, parts, options):
    """However many tokens are given at a time; padding, on the right, is not seen."""
    q, k, v = qkv()
    attention = functools.partial(
        jshard.nn.dot_product_attention, is_causal=True, implementation="blockwise"
    )
    whole = jax.jit(functools.partial(attention, **options))(q, k, v)
    cache = KVCache.zeros(2, len(LENGTHS), 8, K, H, jnp.float64)
    steps = jnp.arange(T)
    positions = jnp.where(steps < jnp.array(LENGTHS)[:, None], steps, -1)
    run = jax.jit(functools.partial(attend, **options), static_argnums=5)
    given = [np.asarray(x) for x in (q, k, v, positions)]
    outputs, start = [], 0
    for size in parts:
        now = slice(start, start := start + size)
        y, cache = run(*(x[:, now] for x in given), cache, 1)
        outputs.append(y)
    *_, k, v, positions = given
    real = positions >= 0
    np.testing.assert_allclose(
        np.concatenate(outputs, 1)[real],
        np.asarray(whole)[real],
        rtol=1e-12,
        atol=1e-12,
    )
    cache = jax.tree.map(np.asarray, cache)
    for row, length in enumerate(LENGTHS):  # padding is written nowhere
        keys_SKH = cache.k_BLKSH[row, 1].swapaxes(0, 1)
        np.testing.assert_array_equal(keys_SKH[:length], k[row, :length])
        assert not np.any(keys_SKH[length:])
    assert not np.any(cache.v_BLKSH[:, 0])  # the other layer


def test_positions_beyond_the_cache_are_written_nowhere():
    q, k, v = qkv(jnp.float32)
    positions = jnp.full((len(LENGTHS), T), 8).at[:, 1].set(-5)
    empty = KVCache.zeros(1, len(LENGTHS), 8, K, H, jnp.float32)
    y, cache = jax.jit(attend, static_argnums=5)(q, k, v, positions, empty, 0)
    assert not any(jnp.any(x) for x in cache)
    assert jnp.all(jnp.isfinite(y))


def test_is_in_the_dtypes_of_queries_and_cache():
    q, k, v = qkv(jnp.bfloat16)
    empty = KVCache.zeros(1, len(LENGTHS), T, K, H, jnp.float32)
    run = functools.partial(attend, layer=0)
    y, cache = jax.eval_shape(run, q, k, v, jnp.zeros((3, T), jnp.int32), empty)
    assert y.dtype == jnp.bfloat16
    assert cache.k_BLKSH.dtype == jnp.float32


@pytest.mark.usefixtures("x64")
def test_crossed_attention_and_a_bias_are_a_plain_softmax():
    rng = np.random.default_rng(0)
    L, B, S, T = 3, 2, 5, 2
    k, v = rng.normal(size=(2, L, B, S, N, H))
    q, bias = rng.normal(size=(B, T, N, H)), rng.normal(size=(B, N, T, S))
    mask = np.arange(S) < [[5], [2]]

    def plain(scores, seen, layer):
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("bnts,bsnh->btnh", weights, v[layer])

    crossed = KVCache.stacked(jax.device_put(k), jax.device_put(v), jnp.float64)
    scores = np.einsum("btnh,bsnh->bnts", q, k[1])
    cross = jax.jit(functools.partial(cross_attend, scale=1.0), static_argnums=2)
    got = cross(q, crossed, 1, mask)
    np.testing.assert_allclose(got, plain(scores, mask[:, None, None], 1), rtol=1e-12)

    last = np.tile([3, 4], (B, 1))  # of five tokens, three are cached
    attended = jax.jit(functools.partial(attend, scale=1.0), static_argnums=5)
    new = (x[1][:, 3:] for x in (k, v))
    got, _ = attended(q, *new, last, crossed, 1, bias_BNTS=bias)
    causal = np.arange(S) <= np.array([[3], [4]])
    np.testing.assert_allclose(got, plain(scores + bias, causal, 1), rtol=1e-12)


def test_shapes_that_would_broadcast_are_refused():
    cache = KVCache.zeros(1, 2, 4, 1, 8, jnp.float32)
    q, k = jnp.ones((2, 3, 2, 8)), jnp.ones((2, 3, 1, 8))
    run = functools.partial(attend, layer=0)
    jax.eval_shape(run, q, k, k, jnp.zeros((2, 3), jnp.int32), cache)
    for positions in (jnp.arange(3), jnp.zeros((2, 1), jnp.int32)):
        with pytest.raises(AssertionError, match="shape"):
            attend(q, k, k, positions, cache, 0)
    with pytest.raises(AssertionError, match="shape"):
        cross_attend(q, cache, 0, jnp.ones((1, 4), bool))
