"""MXFP8 products: beside NumPy number by number, beside one device, and counted."""

import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jshard
from jshard.plan.start_up import describe, traffic
from jshard.sharding.float8 import blocks, formats
from jshard.sharding.float8.scales import exponents, power_of_two, to_float8
from jshard.sharding.step import checks
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
    traced,
)

MXFP8 = jshard.Precision(products="mxfp8")


# The reference, in NumPy. A block's scale and values, as the specification has them.


def scaled(block: np.ndarray) -> tuple[np.ndarray, int]:
    """(float8 values, exponent) of numbers that share a scale: 2**exponent."""
    largest = np.max(np.abs(block))
    exponent = int(np.ceil(np.log2(largest / 448))) if largest else -126
    values = np.ldexp(block.astype(np.float64), -exponent)
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn), exponent


def rounded(x: np.ndarray, *sides: int) -> np.ndarray:
    """What a matrix is after quantization in blocks with these sides."""
    rows, columns = sides
    shape = -1, rows, x.shape[1] // columns, columns
    full = np.pad(x, ((0, -x.shape[0] % rows), (0, 0))).reshape(shape)
    largest = np.max(np.abs(full), axis=(1, 3), keepdims=True)
    least = np.maximum(largest, 2.0**-100)  # of zeros
    exponents = np.ceil(np.log2(least / 448)).astype(int)
    values = np.ldexp(full.astype(np.float64), -exponents).astype(np.float32)
    values = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.ldexp(values, exponents).reshape(-1, x.shape[1])[: len(x)]


def numbers() -> np.ndarray:
    """Rows of 64, of all sizes; blocks of zeros, and those whose largest just fits."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 64)) * 2.0 ** rng.integers(-30, 30, size=(64, 2)).repeat(
        32, axis=1
    )
    x[0, :32] = 0
    x[1, :32], x[1, 3], x[2, :32], x[2, 3] = 0, 448 * 2.0**5, 0, -449 * 2.0**5
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_number_is_that_of_the_specification(dtype):
    x = jax.device_put(np.asarray(numbers(), dtype))
    found, scales, _ = jax.jit(formats.mxfp8_rows)(x)
    for row, (values, of_row) in enumerate(zip(found, scales, strict=True)):
        for block in range(2):
            at = slice(32 * block, 32 * block + 32)
            want, exponent = scaled(np.asarray(x[row, at], np.float32))
            assert int(of_row[block]) - 127 == exponent
            got = np.asarray(values[at]).view(np.uint8)
            np.testing.assert_array_equal(got, want.view(np.uint8))


def test_what_is_not_finite_stays_so_and_changes_no_other_block():
    x = numbers()
    x[3, 5], x[4, 40] = np.inf, np.nan
    values, scales, _ = jax.jit(formats.mxfp8_rows)(x)
    y = values.astype(jnp.float32) * power_of_two(scales).repeat(32, axis=1)
    bad = np.asarray(np.isnan(y))
    assert bad[3, :32].all()
    assert bad[4, 40]
    bad[3, :32] = bad[4, 32:] = False
    assert not bad.any()


@pytest.mark.quick("40")
@pytest.mark.parametrize("tokens", [64, 40])
def test_three_products_are_those_of_what_was_rounded(tokens):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(tokens, 128)), rng.normal(size=(128, 64))
    dy = rng.normal(size=(tokens, 64))
    x, w, dy = (a.astype(np.float32) for a in (x, w, dy))
    tiles = np.abs(w).reshape(4, 32, 2, 32).max((1, 3))
    scales = jax.jit(exponents)(tiles)
    values = jax.jit(to_float8, static_argnums=2)(w, scales, jnp.float8_e4m3fn)
    weight = values, scales, None

    @jax.jit
    def run(x: jax.Array, dy: jax.Array) -> tuple:
        multiply = lambda *x: blocks.product("ti,io->to", "mxfp8", x[0], weight, x[1])
        y, backward = jax.vjp(multiply, x, jnp.zeros_like(w))
        return y, *backward(dy)

    y, dx, dw = run(x, dy)
    of_w, of_x, of_dy = rounded(w, 32, 32), rounded(x, 1, 32), rounded(dy, 1, 32)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(y, of_x @ of_w)
    close(dx, of_dy @ of_w.T)
    # Along tokens, of which the last block may have fewer.
    close(dw, rounded(x, 32, 1).T @ rounded(dy, 32, 1))


# The same program on any number of devices.


multiply = rounding_product(
    of_x=lambda x: rounded(x, 1, 32),
    of_w=lambda w: rounded(w, 32, 32),
    of_dy=lambda dy: rounded(dy, 1, 32),
    of_tokens=lambda x, dy: (rounded(x, 32, 1), rounded(dy, 32, 1)),
)


# By default the parts: three products above, weights on any number of devices in
# test_rounded_weights.py, and a step with all formats in test_nvfp4.py.
@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_a_step_is_that_of_one_device(case):
    fsdp = on_mesh(MXFP8, case)
    params, grads, loss = gradients(fsdp)
    # Blocks along tokens are whole on each device, so nothing depends on their number.
    want_loss, want = reference(params, inputs(), multiply, jnp.matmul)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    # But XLA's rounding does: in micro-batches of one example, here, two of 768 tokens
    # have another code in a gradient, which is 1.2e-3 (the error has rank 2).
    assert max(jax.tree.leaves(relative(grads, want))) < 2e-3, relative(grads, want)


@functools.cache
def in_blocks(remat: Any) -> Any:
    """An FSDP, and a step of it as it is traced."""
    policy = jshard.Policy(precision=MXFP8, min_shard_elements=0, remat=remat)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    return fsdp, *traced(fsdp)


@pytest.mark.slow  # test_nvfp4.py has formats of all kinds
@pytest.mark.parametrize("remat", ["dots", "none"])
def test_weights_arrive_in_bytes_and_their_scales_once(remat):
    _, program, _, _ = in_blocks(remat)
    found = traffic(program.jaxpr.jaxpr, {"fsdp": 8, "replica": 1})
    matrices = 2 * WIDTH**2 + 2 * WIDTH * HIDDEN
    gathers = found["all-gather", "int8"]
    assert gathers.count == 2 * 4 * LAYERS
    assert gathers.wire_bytes == 2 * LAYERS * matrices * 7 // 8
    # All exponents of a Stack, a byte for each 1024 weights: what devices agree on.
    exponents = found["all-reduce", "uint8"]
    assert exponents.count == 1
    assert exponents.wire_bytes == 2 * LAYERS * matrices // 1024 * 7 // 8
    # A side of 144 fits float8, and no blocks: it stays in float32.
    plain = found["all-gather", "float32"]
    assert plain.wire_bytes == 2 * LAYERS * WIDTH * NARROW * 4 * 7 // 8


@pytest.mark.slow  # by default the parts, as above
def test_modules_of_a_layer_multiply_in_float8_in_mxfp8_and_in_neither():
    overrides = {
        "layers.up": {"precision": jshard.Precision(products="float8")},
        "layers.general": {"precision": jshard.Precision()},
    }
    policy = jshard.Policy(precision=MXFP8, overrides=overrides, min_shard_elements=0)
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:2]), policy)
    program, *_ = traced(fsdp)
    found = traffic(program.jaxpr.jaxpr, {"fsdp": 2, "replica": 1})
    blocked = LAYERS * (WIDTH**2 + WIDTH * HIDDEN)
    assert found["all-reduce", "uint8"].wire_bytes == blocked // 1024
    assert found["all-reduce", "float32"].wire_bytes >= LAYERS * 4
    _, grads, loss = gradients(fsdp)
    _, exact, want = gradients(jshard.FSDP(fsdp.mesh, jshard.Policy()))
    np.testing.assert_allclose(loss, want, rtol=0.01)
    for got, expected in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert np.linalg.norm(got - expected) < 0.1 * np.linalg.norm(expected)


def test_the_start_up_note_counts_products_in_blocks():
    fsdp, _, state, step = in_blocks("dots")
    note = describe(fsdp, state, inputs(), step)
    matrices = 2 * WIDTH**2 + 2 * WIDTH * HIDDEN
    part = matrices / (matrices + WIDTH * NARROW)
    assert f"{part:.0%} of the FLOPs of products with weights" in note


def mesh_of(kind: str, capability: str) -> Any:
    """What checks read of a mesh of GPUs, absent or not."""
    device = types.SimpleNamespace(
        platform="gpu", compute_capability=capability, device_kind=kind
    )
    return types.SimpleNamespace(devices=np.array([device]), shape={})


@pytest.mark.parametrize(
    ("kind", "capability", "instead"),
    [
        ("NVIDIA H100", "9.0", "NVIDIA H100 has 9.0; use products='float8'"),
        ("NVIDIA A100", "8.0", "NVIDIA A100 has 8.0; use products=None"),
        ("AMD Instinct MI300X", "gfx942", "has gfx942; use products=None"),
    ],
)
@pytest.mark.parametrize("products", ["mxfp8", "nvfp4"])
def test_a_gpu_that_has_no_such_products_is_refused_in_one_line(
    products, kind, capability, instead
):
    policy = jshard.Policy(precision=jshard.Precision(products=products))
    with pytest.raises(jshard.UserError, match=re.escape(instead)) as error:
        checks.check_precisions(policy, mesh_of(kind, capability))
    needs = f"precision.products={products!r} needs NVIDIA GPUs"
    assert str(error.value).startswith(needs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("products", ["mxfp8", "nvfp4"])
def test_a_cudnn_that_has_no_such_products_is_refused_in_one_line(
    monkeypatch, products
):
    policy = jshard.Policy(precision=jshard.Precision(products=products))
    mesh = mesh_of("NVIDIA B200", "10.0")
    checks.check_precisions(policy, mesh)  # absent: the planner says which cuDNN
    monkeypatch.setattr(checks.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(checks, "cudnn_version", lambda: (9, 10))
    checks.check_precisions(policy, mesh)
    monkeypatch.setattr(checks, "cudnn_version", lambda: (9, 8))
    with pytest.raises(jshard.UserError, match=r"cuDNN 9\.10 or newer; this is 9\.8"):
        checks.check_precisions(policy, mesh)
    monkeypatch.setattr(checks, "cudnn_version", lambda: (0, 0))
    with pytest.raises(jshard.UserError, match="or newer; there is none"):
        checks.check_precisions(policy, mesh)


def test_blocks_do_not_go_with_all_parameters_on_the_host():
    policy = jshard.Policy(precision=MXFP8, offload="all")
    with pytest.raises(jshard.UserError, match="'mxfp8' cannot be combined"):
        checks.check_precisions(policy, jshard.make_mesh())
