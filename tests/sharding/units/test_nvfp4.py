"""NVFP4 products: beside NumPy code by code, beside one device, and counted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jshard
from jshard.plan.cost.traffic import least
from jshard.plan.start_up import describe, traffic
from jshard.sharding.float8 import blocks, float4, formats
from jshard.sharding.float8.products import fits
from multiplied import (
    HIDDEN,
    LAYERS,
    MESHES,
    NARROW,
    WIDTH,
    gradients,
    inputs,
    on_mesh,
    reference,
    relative,
    rounding_product,
    stepped,
    traced,
)

NVFP4 = jshard.Precision(products="nvfp4")
MATRICES = 2 * WIDTH**2 + 2 * WIDTH * HIDDEN + WIDTH * NARROW
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


# The reference, in NumPy.


def lowbias32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def shares(x: np.ndarray) -> np.ndarray:
    """Numbers between 0 and 1 that follow from values and their positions."""
    own = x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    place = np.arange(x.size, dtype=np.uint32).reshape(x.shape)
    return (lowbias32(place ^ own * np.uint32(0x9E3779B9)) >> 10) / 2**22


def quantized(
    x: np.ndarray, sides: tuple[int, int], stochastic: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes, scales of blocks in e4m3, and the exponent of the tensor's scale."""
    blocks = x.reshape(-1, sides[0], x.shape[1] // sides[1], sides[1])
    largest = np.abs(blocks).max((1, 3))
    exponent = int(np.ceil(np.log2(largest.max() / (6 * 448)))) if x.any() else -100
    scales = np.ldexp(largest, -exponent) / np.float32(6)
    scales = scales.astype(ml_dtypes.float8_e4m3fn)
    of_each = scales.astype(np.float64).repeat(sides[0], 0).repeat(sides[1], 1)
    of_each[of_each == 0] = np.inf
    values = np.ldexp(x.astype(np.float64), -exponent) / of_each
    if not stochastic:
        codes = values.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        return codes.view(np.uint8), scales, exponent
    below = np.searchsorted(MAGNITUDES[1:-1], np.abs(values), side="right")
    low, high = MAGNITUDES[below], MAGNITUDES[below + 1]
    up = (np.abs(values) - low) / (high - low) + shares(x) >= 1
    return (below + up + 8 * np.signbit(x)).astype(np.uint8), scales, exponent


def rounded(x: np.ndarray, sides: tuple[int, int] = (1, 16), **options) -> np.ndarray:
    """What a matrix is after quantization."""
    codes, scales, exponent = quantized(x, sides, **options)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = scales.astype(np.float32).repeat(sides[0], 0).repeat(sides[1], 1)
    return np.ldexp(values * scales, exponent)


def turned(x: np.ndarray) -> np.ndarray:
    """The transpose, tokens filled up to blocks of 16, and each block rotated."""
    x = np.pad(x, ((0, -x.shape[0] % 16), (0, 0))).T
    matrix = np.asarray(formats.hadamard(), np.float32)
    return (x.reshape(len(x), -1, 16) @ matrix).reshape(x.shape)


def numbers() -> np.ndarray:
    """Rows of 64, of many sizes; blocks of zeros, and scales beyond e4m3's range."""
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.integers(-9, 9, size=(64, 4)).repeat(16, axis=1)
    x = rng.normal(size=(64, 64)) * sizes
    x[0, :16], x[1, :16], x[2, :16] = 0, x[1, :16] * 2.0**-30, MAGNITUDES.repeat(2)
    x[3, :16] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2  # ties
    return x.astype(np.float32)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_code_and_scale_is_that_of_the_recipe(dtype, stochastic):
    x = jax.device_put(np.asarray(numbers(), dtype))
    make = jax.jit(formats.nvfp4_rows, static_argnames="stochastic")
    found = make(x, stochastic=stochastic)
    codes, scales, exponent = quantized(np.asarray(x, np.float32), (1, 16), stochastic)
    np.testing.assert_array_equal(found.scales, scales.view(np.uint8))
    assert found.scale == 2.0**exponent
    # Of two in a byte the first has the low bits, as XLA reads them.
    np.testing.assert_array_equal(found.values & 15, codes[:, ::2])
    np.testing.assert_array_equal(found.values >> 4, codes[:, 1::2])
    np.testing.assert_array_equal(float4.unpack(found.values), codes)


def test_gradients_are_right_on_average_and_other_operands_are_not():
    steps = np.linspace(0, 5.9, 14, dtype=np.float32)
    x = np.empty((20_000, 16), np.float32)
    x[:], x[:, 0], x[:, 1] = steps[[0, 0, *range(14)]], 6, -6  # so that the scale is 1
    rows = jax.jit(formats.FORMATS["nvfp4"].gradients)(x)
    assert rows.scale is not None
    scales = float4.decoded_scales(rows.scales) * rows.scale
    np.testing.assert_array_equal(scales, np.ones_like(scales))
    values = np.asarray(float4.from_float4(float4.unpack(rows.values)))
    # The variance of a coin that falls on one of two neighbours at most 2 apart is 1.
    np.testing.assert_allclose(values.mean(0), x[0], atol=5 / len(x) ** 0.5)
    # Values that are alike in neighbouring places are rounded independently.
    errors = (values - x)[:, 4:15]
    apart = np.corrcoef(errors[:-1].ravel(), errors[1:].ravel())[0, 1]
    assert abs(apart) < 5 / errors.size**0.5
    nearest = jax.jit(formats.FORMATS["nvfp4"].inputs)(x)
    codes = np.asarray(float4.unpack(nearest.values))
    assert (codes == codes[0]).all()


def test_what_is_not_finite_stays_so():
    @jax.jit
    def squared(x: jax.Array) -> jax.Array:
        rows = formats.nvfp4_rows(x)
        return blocks.block_scaled_dot(rows, rows, jnp.float32)

    for bad in (np.nan, -np.inf):
        x = numbers()
        x[3, 5] = bad
        assert not np.isfinite(squared(x)).any()


def test_the_rotation_spreads_outliers_and_cancels_in_the_product():
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(n, 64)).astype(np.float32) for n in (24, 40))
    rotate = jax.jit(formats.FORMATS["nvfp4"].rotated)
    rotated = lambda x: np.asarray(rotate(x), np.float32)
    got = rotated(x) @ rotated(dy).T
    np.testing.assert_allclose(got, x @ dy.T, rtol=1e-4, atol=1e-4)
    matrix = np.asarray(formats.hadamard())
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    outlier = np.zeros((1, 16), np.float32)
    outlier[0, 3] = 8
    np.testing.assert_allclose(np.abs(rotated(outlier)), np.full((1, 16), 2.0))
    ones = np.ones((1, 16), np.float32)
    assert 0 < rotated(ones).max() < 4  # signs differ: not one large value


product_by_hand = rounding_product(
    of_x=rounded,
    of_w=lambda w: rounded(w, (16, 16)),
    of_dy=lambda dy: rounded(dy, stochastic=True),
    of_tokens=lambda x, dy: (
        rounded(turned(x)).T,
        rounded(turned(dy), stochastic=True).T,
    ),
)


@pytest.mark.quick("40-1")
@pytest.mark.parametrize(("tokens", "packed"), [(64, 0), (40, 1)])
def test_three_products_are_those_of_what_was_rounded(tokens, packed):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(tokens, 128)), rng.normal(size=(128, 64))
    dy = rng.normal(size=(tokens, 64))
    x, w, dy = (a.astype(np.float32) for a in (x, w, dy))
    codes, scales, exponent = quantized(w, (16, 16))
    values = float4.pack(jax.device_put(codes), packed)
    weight = values, jax.device_put(scales.view(np.uint8)), jnp.uint8(exponent + 127)

    @jax.jit
    def run(x: jax.Array, dy: jax.Array) -> tuple:
        multiply = lambda *x: blocks.product("ti,io->to", "nvfp4", x[0], weight, x[1])
        y, backward = jax.vjp(multiply, x, jnp.zeros_like(w))
        return y, *backward(dy)

    y, dx, dw = run(x, dy)
    of_w = rounded(w, (16, 16))
    np.testing.assert_allclose(y, rounded(x) @ of_w, rtol=1e-5, atol=1e-4)
    of_dy = rounded(dy, stochastic=True)
    np.testing.assert_allclose(dx, of_dy @ of_w.T, rtol=1e-5, atol=1e-4)
    # Along tokens, of which the last block may have fewer. A sum in another order may
    # take single values across a tie.
    want = rounded(turned(x)) @ rounded(turned(dy), stochastic=True).T
    assert np.linalg.norm(dw - want) < 1e-2 * np.linalg.norm(want)


# The same program on any number of devices.


# By default the parts: three products above, weights on any number of devices in
# test_rounded_weights.py, and a step with all formats below.
@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_a_step_is_the_sum_of_what_each_device_computes(case):
    fsdp = on_mesh(NVFP4, case)
    params, grads, loss = gradients(fsdp)
    # A position is that among a micro-batch's tokens, on which random bits depend.
    parts = np.split(inputs(), fsdp.mesh.size * fsdp.policy.accumulate)
    by_hand = jax.jit(reference, static_argnums=(2, 3))
    found = [by_hand(params, x, product_by_hand, product_by_hand) for x in parts]
    want_loss, want = jax.tree.map(lambda *x: np.sum(x, axis=0), *found)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-4)
    # A sum in another order takes single values across a tie, or gives them other
    # random bits, and all that follows from their token is rounded differently. With
    # other bits everywhere, 0.2.
    assert max(jax.tree.leaves(relative(grads, want))) < 0.06, relative(grads, want)


@functools.cache
def in_all_formats(remat: Any) -> Any:
    """An FSDP, and a step of it as it is traced: NVFP4, but for three weights."""
    overrides: Any = {
        "layers.up": {"precision": jshard.Precision(products="mxfp8")},
        "layers.mixed": {"precision": jshard.Precision(products="float8")},
        "layers.general": {"precision": jshard.Precision()},
    }
    policy = jshard.Policy(
        precision=NVFP4, min_shard_elements=0, remat=remat, overrides=overrides
    )
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    return fsdp, *traced(fsdp)


@pytest.mark.quick("dots")
@pytest.mark.parametrize("remat", ["dots", "none"])
def test_weights_arrive_in_their_formats_and_their_scales_once(remat):
    fsdp, program, state, _ = in_all_formats(remat)
    found = traffic(program.jaxpr.jaxpr, {"fsdp": 8, "replica": 1})
    down_and_narrow = WIDTH * HIDDEN + WIDTH * NARROW
    up, general = WIDTH * HIDDEN, WIDTH**2
    gathers = {dtype: x for (kind, dtype), x in found.items() if kind == "all-gather"}
    # Forward and backward: of two weights each, and of the one in float32.
    assert {dtype: x.count for dtype, x in gathers.items()} == {
        "uint8": 2 * 2 * LAYERS,
        "int8": 2 * 2 * LAYERS,
        "float32": 2 * LAYERS,
    }
    in_four_bits = 2 * LAYERS * down_and_narrow // 2 * 7 // 8
    assert gathers["uint8"].wire_bytes == in_four_bits
    needed = least(fsdp.mesh, fsdp.policy, state, prefetch=False)
    assert needed["all-gather", "u8"] == in_four_bits
    in_bytes = up + WIDTH**2
    assert gathers["int8"].wire_bytes == 2 * LAYERS * in_bytes * 7 // 8
    assert gathers["float32"].wire_bytes == 2 * LAYERS * general * 4 * 7 // 8
    # A byte for each 256 weights, and one for each weight: what devices agree on. In
    # MXFP8 one for each 1024 weights.
    scales = found["all-reduce", "uint8"]
    assert scales.count == 3
    of_all = LAYERS * down_and_narrow // 256, LAYERS * 2, LAYERS * up // 1024
    assert scales.wire_bytes == sum(2 * (n * 7 // 8) for n in of_all)


@pytest.mark.slow  # each format has its products
def test_formats_of_all_kinds_meet_in_a_layer():
    fsdp, _, _, step = in_all_formats("dots")
    params, grads, loss = stepped(fsdp, step)
    want, exact = jax.jit(reference, static_argnums=(2, 3))(
        params, inputs(), jnp.matmul, jnp.matmul
    )
    np.testing.assert_allclose(loss, want, rtol=0.05)
    assert max(jax.tree.leaves(relative(grads, exact))) < 0.3


def test_weights_that_blocks_of_16_do_not_divide_are_not_taken():
    assert fits((128, 144), (-2,), "nvfp4")
    assert not fits((128, 144), (-2,), "mxfp8")
    assert fits((128, 16, 8), (-3,), "float8")
    assert not fits((128, 16, 8), (-3,), "nvfp4")


def test_thin_and_small_weights_are_not_taken():
    thinnest = 16 * 128
    assert fits((128, thinnest - 16), (-2,), "float8")
    assert not fits((128, thinnest), (-2,), "float8")
    assert not fits((112, 128), (-2,), "float8")
    assert not fits((128, 136), (-2,), "float8")


def test_the_start_up_note_counts_all_of_a_product_s_flops():
    fsdp, _, state, step = in_all_formats("dots")
    # Neither halves for two values a byte, nor the rotations.
    part = 1 - WIDTH**2 / MATRICES
    note = describe(fsdp, state, inputs(), step)
    assert f"{part:.0%} of the FLOPs of products with weights" in note
