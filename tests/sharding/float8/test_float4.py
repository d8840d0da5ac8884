"""Four bits, their scales, and the random bits that round them, number by number."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jshard.sharding.float8 import float4, scales
from jshard.sharding.float8.random_bits import fold, random_bits, random_words

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
ALL = np.concatenate([MAGNITUDES, np.negative(MAGNITUDES)])
# One program each: of an operation at a time JAX compiles many.
to_float4 = jax.jit(float4.to_float4, static_argnames="stochastic")
from_float4 = jax.jit(float4.from_float4)
exponents = jax.jit(scales.exponents)
bits_of = jax.jit(random_bits, static_argnums=(1, 2))
words_of, folded = jax.jit(random_words), jax.jit(fold)
pack = jax.jit(float4.pack, static_argnums=1)
unpack = jax.jit(float4.unpack, static_argnums=1)
largest_of = jax.jit(float4.largest, static_argnums=1)
tensor_exponents = jax.jit(float4.tensor_exponents)
block_scales = jax.jit(float4.block_scales)
decoded_scales = jax.jit(float4.decoded_scales)
power_of_two = jax.jit(scales.power_of_two)
spread = jax.jit(scales.spread, static_argnums=1)
to_float8 = jax.jit(scales.to_float8, static_argnums=2)


def test_codes_are_those_of_e2m1_ties_and_what_is_too_large_included():
    between = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    near = [np.nextafter(between, 0, dtype=np.float32), between]
    near.append(np.nextafter(between, 7, dtype=np.float32))
    random = np.random.default_rng(0).uniform(0, 6, 100)
    x = np.concatenate([MAGNITUDES, *near, random]).astype(ml_dtypes.bfloat16)
    x = np.concatenate([x, np.negative(x)]).astype(np.float32)
    want = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(to_float4(x, np.ones(1)), want)
    np.testing.assert_array_equal(to_float4(3 * x, np.full(1, 3.0)), want)
    large = to_float4(jnp.array([6.5, 1e9, -7.0]), jnp.ones(1))
    np.testing.assert_array_equal(large, [7, 7, 15])


def test_codes_have_their_values_and_come_back():
    codes = jnp.arange(16, dtype=jnp.uint8)
    np.testing.assert_array_equal(from_float4(codes), ALL)
    np.testing.assert_array_equal(to_float4(ALL, np.ones(1)), codes)


def test_each_block_has_its_own_scale_and_one_of_zero_has_zeros():
    x = np.array([[1, 2, 4, 6], [1, 1, 3, 0]], np.float32)
    codes = to_float4(x, jnp.array([[1, 2], [0.5, 0]]))
    values = from_float4(codes)
    np.testing.assert_array_equal(values, [[1, 2, 2, 3], [2, 2, 0, 0]])


def test_a_value_is_rounded_up_as_often_as_it_is_near_the_magnitude_above():
    for value, low, high in ((0.375, 0, 0.5), (1.25, 1, 1.5), (5.5, 4, 6)):
        x = np.full(20_000, value, np.float32)
        x[1::2] = -value
        values = np.asarray(from_float4(to_float4(x, np.ones(1), stochastic=True)))
        found = np.abs(values)
        assert {*found.tolist()} == {low, high}
        if low:
            np.testing.assert_array_equal(values < 0, x < 0)
        share = np.mean(found == high)
        want = (value - low) / (high - low)
        assert abs(share - want) < 5 * 0.5 / math.sqrt(len(x))
    exact = to_float4(ALL, np.ones(1), stochastic=True)
    np.testing.assert_array_equal(from_float4(exact), ALL)


def test_stochastic_codes_are_those_of_the_bits_of_position_and_value():
    x = np.random.default_rng(1).uniform(-6, 6, (4, 8)).astype(ml_dtypes.bfloat16)
    own = x.view(np.uint16).astype(np.uint32)
    shares = np.asarray(words_of(jax.device_put(own)), np.float64) / 2**32
    size = np.abs(x.astype(np.float64))
    below = np.searchsorted(MAGNITUDES[1:-1], size, side="right")
    low, high = MAGNITUDES[below], MAGNITUDES[below + 1]
    want = below + ((size - low) / (high - low) + shares >= 1) + 8 * np.signbit(x)
    got = to_float4(jax.device_put(x), np.ones((1, 1)), stochastic=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_neighbours_share_a_byte_the_first_its_low_bits(dim):
    codes = np.random.default_rng(0).integers(0, 16, (4, 6)).astype(np.uint8)
    packed = pack(jax.device_put(codes), dim)
    first, second = (np.take(codes, range(i, codes.shape[dim], 2), dim) for i in (0, 1))
    np.testing.assert_array_equal(packed, first + 16 * second)
    np.testing.assert_array_equal(unpack(packed, dim), codes)
    stacked = jax.device_put(codes)[None]
    np.testing.assert_array_equal(float4.unpack(float4.pack(stacked)), stacked)
    assert float4.pack(stacked).shape == (1, 4, 3)


def test_the_largest_is_that_of_magnitudes_and_not_a_number_if_one_is_not():
    x = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    assert largest_of(x) == 3
    np.testing.assert_array_equal(largest_of(x, 0), [2, 3])
    np.testing.assert_array_equal(largest_of(x, (0, 1)), 3)
    assert np.isnan(largest_of(x.at[0, 0].set(-jnp.nan)))
    assert largest_of(x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_the_scales_of_all_blocks_fit_that_of_their_tensor():
    largest = jnp.array([6.0, 6 * 448.0, 6 * 449.0, 1e-38, 0.0])
    exponents = tensor_exponents(largest)
    scales = power_of_two(exponents)
    np.testing.assert_array_equal(scales, [2.0**-8, 1, 2, 2.0**-100, 2.0**-100])
    blocks = jnp.array([[6.0, 3.0, 1.1], [12.0, 6 * 448.0, 0]])
    bits = block_scales(blocks, exponents[1:3])
    e4m3 = np.asarray(bits).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    want = np.asarray(blocks) / np.float32(6) / np.array([[1], [2]], np.float32)
    want = want.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3, want)
    np.testing.assert_array_equal(decoded_scales(bits), want)
    whole = decoded_scales(bits, exponents[1:3])
    np.testing.assert_array_equal(whole, want * [[1], [2]])


def test_a_block_of_e8m0_fits_and_would_not_with_half_the_scale():
    """Exactly: of numbers on both sides of each bound."""
    bounds = [448 * 2.0**e for e in (-120, -1, 0, 1, 100)]
    near = [
        np.nextafter(np.float32(x), np.float32(y)) for x in bounds for y in (0, 3e38)
    ]
    for value in [*map(np.float32, bounds), *near, np.float32(1), np.float32(1e38)]:
        exponent = int(exponents(jnp.float32(value)))
        scale = Fraction(2) ** (exponent - 127)
        assert scale / 2 < Fraction(float(value)) / 448 <= scale
        assert power_of_two(jnp.uint8(exponent)) == float(scale)


def test_special_blocks_have_the_smallest_scale_or_none():
    x = jnp.array([0.0, 1e-45, 1e-37, jnp.inf, jnp.nan, -jnp.nan])
    found = exponents(x).tolist()
    assert found == [1, 1, 1, 255, 255, 255]
    bits = jnp.array([0x7F800000, 0x7F7FFFFF, 0xFFC00000], jnp.uint32).view(jnp.float32)
    assert exponents(bits).tolist() == [255, 247, 255]
    assert np.isinf(power_of_two(jnp.uint8(255)))


def test_scales_are_repeated_for_the_values_of_their_blocks():
    scales = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    got = spread(scales, (4, 3))
    np.testing.assert_array_equal(got, np.repeat(scales, 2, axis=0))
    assert spread(jnp.float32(2), (4, 3)) == 2
    x = jnp.full((4, 6), 12.0)
    values = to_float8(x, scales, jnp.float8_e4m3fn)
    blocks = np.repeat(np.repeat(scales, 2, 0), 2, 1)
    want = (12 * (1 / blocks)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(values, want)
    powers = jnp.array([128, 126], jnp.uint8)  # 2 and 1/2
    values = to_float8(jnp.ones(4), powers, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(values.astype(jnp.float32), [0.5, 0.5, 2, 2])


@pytest.mark.parametrize(
    ("dtype", "most"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_scale_is_the_smallest_power_above_the_ratio(dtype, most, compiled):
    of = functools.partial(scales.tensor_scale, dtype=jnp.dtype(dtype))
    of = jax.jit(of) if compiled else of
    scale = lambda x: float(of(jnp.float32(x)))
    assert scale(most) == 2  # above, also where the ratio is a power
    assert scale(np.nextafter(np.float32(most), np.float32(0))) == 1
    assert scale(3 * most) == 4
    assert scale(0) == 1
    tiny = np.finfo(np.float32).tiny
    assert scale(tiny * most) == 2 * tiny
    assert scale(tiny) == 1
    assert math.isinf(scale(np.inf))
    assert scales.largest(jnp.array([1.0, -3.0])) == 3


# Random bits: the same on all hardware and in all versions, or runs would differ.


def lowbias32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_random_bits_are_a_hash_of_key_and_position():
    key = (0xDEADBEEF, 0x12345678)
    words = tuple(map(jnp.uint32, key))
    bits = np.asarray(bits_of(words, (3, 5)))
    assert bits.dtype == np.uint16
    for i in range(15):
        inner = lowbias32((i + key[0]) % 2**32)
        assert bits.flat[i] == lowbias32(inner ^ key[1]) >> 16


def test_a_layer_has_the_bits_of_its_folded_key():
    words = tuple(map(jnp.uint32, (3, 2**32 - 1)))
    bits = np.asarray(bits_of(words, (2, 3, 5), 2, 4))
    for i, j in np.ndindex(2, 3):
        key = folded(folded(words, 4 + i), j)
        np.testing.assert_array_equal(bits[i, j], bits_of(key, (5,)))
    first, second = folded(words, 6)
    assert int(first) == lowbias32(3 ^ 6)
    assert int(second) == lowbias32((2**32 - 1 + 6) % 2**32)


def test_random_words_are_a_hash_of_position_and_value():
    own = np.array([[7, 2**31], [3, 3]], np.uint32)
    words = np.asarray(words_of(jax.device_put(own)))
    for i, value in enumerate(own.flat):
        assert words.flat[i] == lowbias32(i ^ int(value) * 0x9E3779B9 % 2**32)
