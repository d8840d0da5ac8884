"""All-gathers in one byte: what quantization costs, and what travels."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import hlo
import jshard
from jshard.sharding.collectives import quantized
from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.float8 import scales
from jshard.sharding.float8.scales import BLOCK, dequantize, quantize
from jshard.sharding.layout.placement import Placement, Sharding, Weight

# Half the distance between neighbours, relative to the block's largest value (int8) or
# to the value itself; what is below fp8's smallest normal value keeps its step.
HALF_STEP = {
    "int8": lambda x, largest: largest / 127 / 2,
    "float8_e4m3fn": lambda x, largest: np.maximum(x / 2**4, largest / 448 / 2**10),
    "float8_e5m2": lambda x, largest: np.maximum(x / 2**3, largest / 57344 / 2**17),
}
dtypes = pytest.mark.parametrize("dtype", HALF_STEP)


@functools.partial(jax.jit, static_argnums=1)
def round_trip(x: jax.Array, dtype: str) -> jax.Array:
    return dequantize(*quantize(x, jnp.dtype(dtype)))


@jax.jit
def float8_values(x: jax.Array) -> jax.Array:
    scale = scales.tensor_scale(scales.largest(x), jnp.float8_e4m3fn)
    values = scales.to_float8(x, scale, jnp.float8_e4m3fn)
    return values.astype(jnp.float32) * scale


tensor_scale = jax.jit(scales.tensor_scale, static_argnums=1)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dtypes
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    special=st.lists(st.floats(-8, 8, width=32), max_size=6),
    exponent=st.integers(-90, 90),
)
def test_an_error_is_at_most_half_a_step_of_its_block(dtype, seed, special, exponent):
    x = normal(2, BLOCK, seed=seed)
    x[0, : len(special)] = special
    x = np.ldexp(x, exponent)
    error = np.abs(np.reshape(round_trip(x, dtype), x.shape) - x)
    largest = np.max(np.abs(x), axis=1, keepdims=True)
    assert np.all(error <= HALF_STEP[dtype](np.abs(x), largest) * 1.0001)


@dtypes
def test_zeros_stay_zeros_and_the_largest_value_stays_itself(dtype):
    x = np.concatenate([np.zeros(BLOCK, np.float32), normal(BLOCK)])
    got = np.asarray(round_trip(x, dtype))
    np.testing.assert_array_equal(got[:BLOCK], 0)
    at = np.argmax(np.abs(x))
    np.testing.assert_allclose(got[at], x[at], rtol=1e-6)


@dtypes
@pytest.mark.parametrize("largest", [1e-36, 1e-38, 3e-43, 1e-45])
def test_the_smallest_blocks_become_zeros_and_not_garbage(dtype, largest):
    x = np.linspace(-largest, largest, BLOCK, dtype=np.float32)
    got = np.asarray(round_trip(x, dtype))
    np.testing.assert_allclose(got, 0, atol=1e-36)


@dtypes
def test_an_outlier_costs_its_own_block_alone(dtype):
    x = normal(3 * BLOCK)
    calm = np.asarray(round_trip(x, dtype))
    x[BLOCK + 7] = 1e6
    got = np.asarray(round_trip(x, dtype))
    own = np.s_[BLOCK : 2 * BLOCK]
    assert np.any(got[own] != calm[own])
    np.testing.assert_array_equal(np.delete(got, own), np.delete(calm, own))


@dtypes
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(dtype, bad):
    x = normal(3 * BLOCK)
    x[BLOCK + 7] = bad
    got = np.asarray(round_trip(x, dtype)).reshape(3, BLOCK)
    np.testing.assert_array_equal(np.isnan(got).all(axis=1), [False, True, False])
    assert np.isfinite(got[[0, 2]]).all()


@dtypes
@pytest.mark.parametrize("dim", [0, 1])
def test_every_device_sees_the_same_weights_its_own_shard_too(dtype, dim):
    full = normal(48, 40)
    spec = P(*[None] * dim, "fsdp")
    mesh = jshard.make_mesh()

    def gathered(shard: jax.Array) -> jax.Array:
        return quantized.gather_quantized(shard, dim, jnp.dtype(dtype))[None]

    got = jax.jit(
        jax.shard_map(
            gathered,
            mesh=mesh,
            in_specs=spec,
            out_specs=P("fsdp"),
            check_vma=False,
        )
    )(full)
    parts = np.split(full, 8, axis=dim)
    want = np.concatenate(
        [np.reshape(round_trip(part, dtype), part.shape) for part in parts], axis=dim
    )
    assert np.any(want != full)
    for seen in np.asarray(got):
        np.testing.assert_array_equal(seen, want)


def gradient(gather: Any, weights: jax.Array, upstream: jax.Array) -> Any:
    """The compiled gradient of a matrix that is gathered."""
    place = Placement(Sharding(-2), weight=Weight(gather=gather))

    def local(shard: jax.Array, upstream: jax.Array) -> jax.Array:
        full: Any
        full, pullback = jax.vjp(lambda w: all_gather(w, place), shard)
        # The forward's result, too, so that its gather is not dead.
        return pullback(upstream[0] * jnp.sum(full))[0]

    spec = P("fsdp")
    mapped = jax.shard_map(
        local,
        mesh=jshard.make_mesh(),
        in_specs=(spec, P(("replica", "fsdp"))),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped).lower(weights, upstream).compile()


@dtypes
def test_bytes_travel_forward_and_gradients_return_in_full(dtype):
    # A device's shard is 528 values: two blocks, and one that is not full.
    weights = jax.device_put(normal(32, 132))
    upstream = jax.device_put(normal(8, 32, 132, seed=1))
    compiled = gradient(jnp.dtype(dtype), weights, upstream)
    *gathers, scatter = hlo.collectives(compiled.as_text())
    assert scatter.kind == "reduce-scatter"
    assert scatter.operands == (hlo.Array("f32", (32, 132)),)
    assert {c.kind for c in gathers} == {"all-gather"}
    sent = {array.dtype: array.size for c in gathers for array in c.operands}
    assert sent == {"s8": 528, "f32": 3}
    assert sum(c.wire_bytes for c in gathers) == 7 * (528 + 3 * 4)


# Products in float8: one scale for a tensor.


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("largest", [1e-30, 0.7, 448.0, 1e30])
def test_a_scale_is_a_power_of_two_that_the_largest_value_nearly_fills(dtype, largest):
    scale = tensor_scale(jnp.float32(largest), dtype)
    assert np.frexp(scale)[0] == 0.5
    assert 0.5 <= largest / scale / float(jnp.finfo(dtype).max) < 1


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_visible(bad):
    x = np.ones(8, np.float32)
    x[3] = bad
    assert not np.isfinite(float8_values(x)).any()


def test_zeros_stay_zeros():
    assert not np.any(float8_values(np.zeros(8, np.float32)))
