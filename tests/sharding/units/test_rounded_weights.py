"""Weights in float8 and in blocks are rounded alike on any number of devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jshard
from jshard.sharding.collectives.gather import gather
from jshard.sharding.collectives.in_float8 import in_float8
from jshard.sharding.float8 import float4
from jshard.sharding.float8.products import Float8
from jshard.sharding.float8.scales import power_of_two
from jshard.sharding.layout.placement import Placement, Sharding, Weight

E4M3 = ml_dtypes.float8_e4m3fn
# Shapes, and dimensions that products sum over: of a linear layer, and of attention's
# projections to and from heads. Shards of three, six and eight end within blocks.
WEIGHTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((64, 96), (-2,)),
    ((64, 2, 32), (-3,)),
    ((2, 32, 64), (-3, -2)),
]


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Of many sizes, so that each block has another scale."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-6, 6, size=shape)
    return (rng.normal(size=shape) * sizes).astype(np.float32)


def by_hand(kind: str, x: np.ndarray, over: tuple[int, ...]) -> np.ndarray:
    """The weight after rounding, in NumPy."""
    matrix = x.reshape(math.prod(x.shape[d] for d in over), -1)
    if kind == "float8":
        scale = 2.0 ** (np.floor(np.log2(np.abs(x).max() / 448)) + 1)
        return (x / scale).astype(E4M3).astype(np.float32) * np.float32(scale)
    side = 32 if kind == "mxfp8" else 16
    tiles = matrix.reshape(matrix.shape[0] // side, side, -1, side)
    largest = np.abs(tiles).max((1, 3), keepdims=True)
    if kind == "mxfp8":
        scales = 2.0 ** np.ceil(np.log2(largest / 448))
        rounded = (tiles / scales).astype(E4M3).astype(np.float32) * scales
    else:
        of_all = 2.0 ** np.ceil(np.log2(largest.max() / (6 * 448)))
        scales = (largest / of_all / 6).astype(np.float32).astype(E4M3)
        scales = scales.astype(np.float32) * of_all
        codes = (tiles / scales).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        rounded = codes.astype(np.float32) * scales
    return rounded.reshape(x.shape).astype(np.float32)


def dense(weight: Float8) -> jax.Array:
    """The weight that a layer's products read."""
    if weight.kind == "float8":
        return weight.values.astype(jnp.float32) * weight.scale
    scales, found = power_of_two(weight.scale), weight.values.astype(jnp.float32)
    if weight.kind == "nvfp4":
        (packed,) = (d for d in range(found.ndim) if found.shape[d] < weight.shape[d])
        found = float4.from_float4(float4.unpack(weight.values, packed))
        scales = float4.decoded_scales(weight.scale, weight.tensor)
    for dim, (size, blocks) in enumerate(zip(weight.shape, scales.shape, strict=True)):
        scales = jnp.repeat(scales, size // blocks, axis=dim)
    return found.astype(jnp.float32) * scales


@pytest.mark.quick("3--1-nvfp4", "6--2-mxfp8", "3--1-float8")
@pytest.mark.parametrize("kind", ["float8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("devices", "dim"), [(1, None), (3, -1), (6, -2), (8, -1)])
def test_a_weight_is_rounded_alike_on_any_number_of_devices(kind, devices, dim):
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    layers = 2
    given, shards, specs, places = [], [], [], []
    for seed, (shape, over) in enumerate(WEIGHTS):
        x = values((layers, *shape), seed)
        given.append(x)
        place = Placement(Sharding(dim), weight=Weight(float8=kind, summed=over))
        spec: list[Any] = [None] * x.ndim
        if dim is not None:
            missing = -shape[dim] % devices
            place = Placement(
                Sharding(dim, exact=(dim, shape[dim])),
                weight=Weight(float8=kind, summed=over),
            )
            x = np.pad(x, [(0, missing * (d == x.ndim + dim)) for d in range(x.ndim)])
            spec[dim] = "fsdp"
        shards.append(x)
        specs.append(P(*spec))
        places.append(place)

    def local(shards: list[jax.Array]) -> list[list[jax.Array]]:
        layer, inputs, placed = in_float8(
            lambda weights, *_: weights, shards, places, stacked=True
        )
        of_layers = []
        for i in range(layers):
            own = jax.tree.map(lambda x, i=i: x[i], inputs)
            weights = layer(gather(own, placed), [], None, [])
            of_layers.append(list(map(dense, weights)))
        return of_layers

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    for i, found in enumerate(jax.jit(run)(shards)):
        for x, weight, (_, over) in zip(given, found, WEIGHTS, strict=True):
            np.testing.assert_array_equal(weight, by_hand(kind, x[i], over))
