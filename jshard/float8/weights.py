"""Gathers a unit's weights for float8 products in float8, with their scales.

A weight's scales are the same on all devices, so its shards need the largest magnitude
among them: one all-reduce a unit, for all its weights and for all layers of a Stack. A
weight has one scale, or in MXFP8 one for each block of 32 x 32, and a shard may end in
one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.collectives.gather import all_gather
from jshard.collectives.quantized import exponents, tensor_scale
from jshard.float8.blocks import BLOCK, MXFP8, blocked, grid
from jshard.float8.products import E4M3, Float8
from jshard.fsdp.mesh import shard_axes
from jshard.layout.placement import Placement


def in_float8(
    fn: Callable[..., Any],
    shards: list[jax.Array],
    places: list[Placement],
    *,
    stacked: bool,
) -> tuple[Callable[..., Any], list[Any], list[Placement]]:
    """Returns a unit's function and parameters with weights in float8, if it has any.

    The shards of these, each with its scales, become parameters that are not trained,
    and are rounded as they are gathered. The parameters themselves are not gathered,
    and take the gradients. The scales are the last parameters, too: what depends on
    weights alone is not kept for the backward. With ``stacked``, the unit is a Stack,
    and its shards are (L, ...).
    """
    chosen = [i for i, place in enumerate(places) if place.float8]
    if not chosen:
        return fn, shards, places
    chosen.sort(key=lambda i: str(places[i].float8))
    scaled, packed, grids = [], [], []
    for kind, members in itertools.groupby(chosen, lambda i: places[i].float8):
        of_kind = [(lax.stop_gradient(shards[i]), places[i]) for i in members]
        scales_of = _block_scales if kind == MXFP8 else _tensor_scales
        found = scales_of(of_kind, int(stacked))
        scaled += found[0]
        packed.append(found[1])
        grids.append(found[2])
    as_values = {"gather": jnp.dtype(E4M3), "compute": None, "trainable": False}
    places_of_values = [dataclasses.replace(places[i], **as_values) for i in chosen]
    kept = [dataclasses.replace(p, gradient_only=bool(p.float8)) for p in places]
    places_of_scales = [Placement(None, trainable=False)] * len(packed)

    def decoded(weights, xs, carry, args):
        weights, further = list(weights[: len(kept)]), weights[len(kept) :]
        values, packed = further[: len(chosen)], further[len(chosen) :]
        scales = itertools.chain.from_iterable(map(_parts, packed, grids))
        for i, value, scale in zip(chosen, values, scales, strict=True):
            weights[i] = Float8(value, scale, weights[i])
        return fn(weights, xs, carry, args)

    places = [*kept, *places_of_values, *places_of_scales]
    return decoded, [*shards, *scaled, *packed], places


# Of each: shards with what divides them, all scales in one array, and their shapes.
_Scales = tuple[list[tuple[jax.Array, jax.Array]], jax.Array, list[tuple[int, ...]]]
_Weights = Sequence[tuple[jax.Array, Placement]]


def _tensor_scales(weights: _Weights, layers: int) -> _Scales:
    """One scale for each weight, (weights,), or (L, weights) with ``layers``."""
    largest = [jnp.max(jnp.abs(x), axis=range(layers, x.ndim)) for x, _ in weights]
    together = jnp.stack([x.astype(jnp.float32) for x in largest], axis=-1)
    scales = tensor_scale(lax.pmax(together, shard_axes()), E4M3)
    scaled = [(shard, scales[..., i]) for i, (shard, _) in enumerate(weights)]
    return scaled, scales, [()] * len(weights)


def _block_scales(weights: _Weights, layers: int) -> _Scales:
    """The exponents of all weights' blocks, (blocks,), or (L, blocks)."""
    grids = []
    for shard, place in weights:
        full = jax.eval_shape(functools.partial(all_gather, place=place), shard)
        grids.append(grid(full.shape[layers:], place.summed))
    known = [
        _of_shard(shard, place, size).reshape(*shard.shape[:layers], -1)
        for size, (shard, place) in zip(grids, weights, strict=True)
    ]
    packed = lax.pmax(jnp.concatenate(known, axis=-1), shard_axes())
    scaled = [
        (shard, _for_shard(scales, shard, place, len(size)))
        for (shard, place), scales, size in zip(
            weights, _parts(packed, grids), grids, strict=True
        )
    ]
    return scaled, packed, grids


def _parts(packed: jax.Array, grids: list[tuple[int, ...]]) -> list[jax.Array]:
    """Takes each weight's scales out of the array of all."""
    ends = np.cumsum([math.prod(size) for size in grids])[:-1]
    parts = jnp.split(packed, ends, axis=-1)
    lead = packed.shape[:-1]
    return [x.reshape(*lead, *size) for x, size in zip(parts, grids, strict=True)]


def _of_shard(shard: jax.Array, place: Placement, size: tuple[int, ...]) -> jax.Array:
    """Returns the exponents of a weight's blocks, (..., *size), as a shard knows them.

    The largest of all devices are the weight's.
    """
    largest, dims = jnp.abs(shard), blocked(len(size), place.summed)
    for dim in set(dims) - {place.dim}:
        largest = _largest_in_blocks(largest, dim, BLOCK)
    if place.dim is None:
        return exponents(largest)
    # Of the blocks that the shard touches, then in the place of these among all.
    dim, block, start = _start(shard, place, len(size))
    touched = (shard.shape[dim] + 2 * block - 2) // block
    largest = _put(largest, dim, start % block, touched * block)
    found = exponents(_largest_in_blocks(largest, dim, block))
    blocks = shard.shape[dim] * place.shards() // block + touched
    found = _put(found, dim, start // block, blocks)
    return lax.slice_in_dim(found, 0, size[dim], axis=dim % found.ndim)


def _for_shard(
    scales: jax.Array, shard: jax.Array, place: Placement, ndim: int
) -> jax.Array:
    """Returns what divides a shard, of the full weight's scales."""
    if place.dim is None:
        return scales
    dim, block, start = _start(shard, place, ndim)
    at = (start + jnp.arange(shard.shape[dim])) // block
    return jnp.take(scales, at, axis=dim, mode="clip")  # of padding, too


def _start(shard: jax.Array, place: Placement, ndim: int) -> tuple[int, int, Any]:
    """Returns the sharded dimension, blocks' side along it, and the shard's start."""
    assert place.dim is not None
    block = BLOCK if place.dim in blocked(ndim, place.summed) else 1
    return place.dim, block, lax.axis_index(place.axes()) * shard.shape[place.dim]


def _largest_in_blocks(x: jax.Array, dim: int, block: int) -> jax.Array:
    axis = dim % x.ndim
    blocks = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.max(blocks, axis=axis + 1)


def _put(x: jax.Array, dim: int, start: Any, size: int) -> jax.Array:
    """Returns zeros of ``size`` along a dimension, with ``x`` from ``start`` on."""
    shape = list(x.shape)
    shape[dim] = size
    zeros = jnp.zeros(shape, x.dtype)
    return lax.dynamic_update_slice_in_dim(zeros, x, start, dim % x.ndim)
