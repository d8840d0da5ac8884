"""Gathers a unit's weights for float8 products in float8, with their scales.

A weight's scales are the same on all devices, so its shards need the largest magnitude
among them: one all-reduce a unit, for all its weights and for all layers of a Stack. A
weight has one scale, or in MXFP8 one for each block of 32 x 32, and a shard may end in
one. NVFP4, in four bits, has both: one for the tensor, and in its multiples one for
each block of 16 x 16.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.collectives.quantized import ScaledShard
from jshard.sharding.float8 import float4
from jshard.sharding.float8.blocks import blocked, grid, packed
from jshard.sharding.float8.formats import FORMATS, Format
from jshard.sharding.float8.products import E4M3, Float8
from jshard.sharding.float8.scales import exponents, tensor_scale
from jshard.sharding.layout.placement import Gradient, Placement, Sharding
from jshard.sharding.settings.mesh import shard_axes


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
    chosen = [i for i, place in enumerate(places) if place.weight.float8]
    if not chosen:
        return fn, shards, places
    chosen.sort(key=lambda i: str(places[i].weight.float8))
    groups = []
    for kind, members in itertools.groupby(chosen, lambda i: places[i].weight.float8):
        of_kind = [(lax.stop_gradient(shards[i]), places[i]) for i in members]
        groups.append(_scales(kind, of_kind, int(stacked)))
    scaled = [one for found in groups for one in found.scaled]
    of_groups = [(found.together, found.tensors) for found in groups]
    scales, structure = jax.tree.flatten(of_groups)
    places_of_values = [_of_values(places[i], shards[i].ndim - stacked) for i in chosen]
    kept = [_not_gathered(place) if place.weight.float8 else place for place in places]
    fixed = Placement(Sharding(None), gradient=Gradient(trainable=False))
    places_of_scales = [fixed] * len(scales)

    def decoded(weights, xs, carry, args):
        weights, further = list(weights[: len(kept)]), weights[len(kept) :]
        values, scales = further[: len(chosen)], further[len(chosen) :]
        of_weights = []
        for found, scales_of in zip(groups, structure.unflatten(scales), strict=True):
            together, tensors = scales_of
            for i, scale in enumerate(_parts(together, found.shapes)):
                of_weights.append((scale, None if tensors is None else tensors[i]))
        for i, value, (scale, tensor) in zip(chosen, values, of_weights, strict=True):
            kind = places[i].weight.float8 or ""
            weights[i] = Float8(value, scale, tensor, weights[i], kind)
        return fn(weights, xs, carry, args)

    places = [*kept, *places_of_values, *places_of_scales]
    return decoded, [*shards, *scaled, *scales], places


def _of_values(place: Placement, ndim: int) -> Placement:
    """Returns the placement of a weight's values, which are gathered rounded."""
    found = FORMATS.get(place.weight.float8 or "")
    wire = found.wire if found else jnp.dtype(E4M3)
    dim = (
        packed(ndim, place.weight.summed, place.sharding.dim)
        if wire == float4.E2M1
        else None
    )
    weight = dataclasses.replace(place.weight, gather=wire, packed=dim, compute=None)
    gradient = dataclasses.replace(place.gradient, trainable=False)
    return dataclasses.replace(place, weight=weight, gradient=gradient)


def _not_gathered(place: Placement) -> Placement:
    """Returns the placement of what takes the gradient of such a weight."""
    gradient = dataclasses.replace(place.gradient, only=True)
    return dataclasses.replace(place, gradient=gradient)


class _Scales(NamedTuple):
    """The scales of some weights, all in one format.

    Attributes:
      scaled: their shards, each with its scale.
      together: all scales in one array.
      shapes: of each weight's scales.
      tensors: in four bits the exponents of the weights' own scales.
    """

    scaled: list[ScaledShard]
    together: jax.Array
    shapes: list[tuple[int, ...]]
    tensors: jax.Array | None


_Weights = Sequence[tuple[jax.Array, Placement]]


def _scales(kind: str | None, weights: _Weights, layers: int) -> _Scales:
    """Returns the scales of weights in one format, (L, ...) with one of ``layers``."""
    found = FORMATS.get(kind or "")
    if found is None:
        return _tensor_scales(weights, layers)
    return _block_scales(found, weights, layers)


def _tensor_scales(weights: _Weights, layers: int) -> _Scales:
    """One float32 scale for each weight."""
    largest = [jnp.max(jnp.abs(x), axis=range(layers, x.ndim)) for x, _ in weights]
    together = jnp.stack([x.astype(jnp.float32) for x in largest], axis=-1)
    scales = tensor_scale(lax.pmax(together, shard_axes()), E4M3)
    scaled = [ScaledShard(x, scales[..., i]) for i, (x, _) in enumerate(weights)]
    return _Scales(scaled, scales, [()] * len(weights), None)


def _block_scales(format: Format, weights: _Weights, layers: int) -> _Scales:
    """The scales of all weights' blocks, and in four bits those of the weights, too."""
    grids, known, tensors = [], [], None
    if format.wire == float4.E2M1:
        largest = [float4.largest(x, tuple(range(layers, x.ndim))) for x, _ in weights]
        tensors = float4.tensor_exponents(jnp.stack(largest, axis=-1))
        tensors = lax.pmax(tensors, shard_axes())
    for i, (shard, place) in enumerate(weights):
        full = jax.eval_shape(functools.partial(all_gather, place=place), shard)
        grids.append(grid(full.shape[layers:], place.weight.summed, format.block))
        scale_of = exponents
        if tensors is not None:
            scale_of = functools.partial(float4.block_scales, tensors=tensors[..., i])
        found = _of_shard(shard, place, grids[i], format.block, scale_of)
        known.append(found.reshape(*shard.shape[:layers], -1))
    together = lax.pmax(jnp.concatenate(known, axis=-1), shard_axes())
    scaled = []
    for i, of_one in enumerate(_parts(together, grids)):
        shard, place = weights[i]
        scale = _for_shard(of_one, shard, place, len(grids[i]), format.block)
        if tensors is not None:
            scale = float4.decoded_scales(scale, tensors[..., i]).astype(jnp.bfloat16)
        scaled.append(ScaledShard(shard, scale))
    return _Scales(scaled, together, grids, tensors)


def _parts(together: jax.Array, grids: list[tuple[int, ...]]) -> list[jax.Array]:
    """Takes each weight's scales out of the array of all."""
    ends = np.cumsum([math.prod(size) for size in grids])[:-1]
    parts = jnp.split(together, ends, axis=-1)
    lead = together.shape[:-1]
    return [x.reshape(*lead, *size) for x, size in zip(parts, grids, strict=True)]


def _of_shard(
    shard: jax.Array,
    place: Placement,
    size: tuple[int, ...],
    block: int,
    scale_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the scales of a weight's blocks, (..., *size), as a shard knows them.

    The largest of all devices are the weight's.
    """
    largest, dims = jnp.abs(shard), blocked(len(size), place.weight.summed)
    for dim in set(dims) - {place.sharding.dim}:
        largest = _largest_in_blocks(largest, dim, block)
    if place.sharding.dim is None:
        return scale_of(largest)
    # Of the blocks that the shard touches, then in the place of these among all.
    dim, side, start = _start(shard, place, len(size), block)
    touched = (shard.shape[dim] + 2 * side - 2) // side
    largest = _put(largest, dim, start % side, touched * side)
    found = scale_of(_largest_in_blocks(largest, dim, side))
    blocks = shard.shape[dim] * place.shards() // side + touched
    found = _put(found, dim, start // side, blocks)
    return lax.slice_in_dim(found, 0, size[dim], axis=dim % found.ndim)


def _for_shard(
    scales: jax.Array, shard: jax.Array, place: Placement, ndim: int, block: int
) -> jax.Array:
    """Returns what divides a shard, of the full weight's scales."""
    if place.sharding.dim is None:
        return scales
    dim, side, start = _start(shard, place, ndim, block)
    at = (start + jnp.arange(shard.shape[dim])) // side
    return jnp.take(scales, at, axis=dim, mode="clip")  # of padding, too


def _start(
    shard: jax.Array, place: Placement, ndim: int, block: int
) -> tuple[int, int, Any]:
    """Returns the sharded dimension, blocks' side along it, and the shard's start."""
    assert place.sharding.dim is not None
    side = block if place.sharding.dim in blocked(ndim, place.weight.summed) else 1
    return (
        place.sharding.dim,
        side,
        lax.axis_index(place.axes()) * shard.shape[place.sharding.dim],
    )


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
