"""All-gathers of parameters, with the dtypes on the wire.

Everything here runs inside ``shard_map(check_vma=False)``: an array is one device's
own, and nothing is summed over devices unless a line of ``reduce.py`` says so.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.sharding.collectives import quantized
from jshard.sharding.collectives.quantized import ScaledShard
from jshard.sharding.collectives.reduce import (
    all_reduce_in_unit,
    cast,
    on_rank_zero,
    scatter,
)
from jshard.sharding.float8 import float4
from jshard.sharding.float8.scales import to_float8
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.precision import is_quantized
from jshard.sharding.settings.scopes import ALL_GATHER


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
@jax.named_scope(ALL_GATHER)
def all_gather(shard: Any, place: Placement) -> jax.Array:
    """Returns the full parameter in the layer's dtype, from this device's shard.

    A ``ScaledShard`` is gathered in float8, or as codes of four bits, two a byte.
    """
    if place.gradient.only:
        gradient = dataclasses.replace(place.gradient, only=False)
        place = dataclasses.replace(place, gradient=gradient)
        full = jax.eval_shape(lambda shard: all_gather(shard, place), shard)
        return jnp.zeros(full.shape, full.dtype)
    scale: Any = None
    if has_scale := isinstance(shard, ScaledShard):
        shard, scale = shard
    shard = place.fetched(shard)
    if has_scale and place.weight.packed is not None:
        shard = float4.pack(float4.to_float4(shard, scale), place.weight.packed)
    elif has_scale:
        shard = to_float8(shard, scale, place.weight.gather)
    quantized_gather = is_quantized(place.weight.gather) and not has_scale
    full = shard if has_scale or quantized_gather else cast(shard, place.weight.gather)
    for dim, axes in _gathers(place, full):
        if quantized_gather:
            full = quantized.gather_quantized(full, dim, place.weight.gather, axes)
        elif is_quantized(full.dtype):
            full = quantized.all_gather_values(full, dim, axes)
        else:
            full = lax.all_gather(full, axes, axis=dim, tiled=True)
    full = place.without_padding(full)
    return on_rank_zero(full.astype(place.weight.compute or shard.dtype), place)


def _gathers(place: Placement, shard: jax.Array) -> list[tuple[int, Any]]:
    """Returns (dimension, axes) of each all-gather that a layer's weight takes."""
    over: list[tuple[int | None, Any]] = []
    if place.shards() > 1:
        turns = place.axes_in_turn(shard.nbytes * place.shards())
        over = [(place.sharding.dim, axes) for axes in reversed(turns)]
    split = [(dim, axis) for dim, axis in place.part.splits if place.part.whole]
    whole = [(dim, axes) for dim, axes in [*over, *split] if dim is not None]
    return [(shard.ndim + dim, axes) for dim, axes in whole]


def take_part(full: jax.Array, place: Placement, group: int) -> jax.Array:
    """Returns this device's part of a full parameter, split over ``group`` neighbours.

    The part has the dtype on the wire where that is smaller. The values were gathered
    in that dtype, so this is lossless. Quantized dtypes are not used: the blocks of a
    part would have other scales.
    """
    if place.sharding.dim is None:
        return full
    full = place.with_padding(full)
    dim, group = full.ndim + place.sharding.dim, min(group, place.shards())
    size = full.shape[dim] // group
    start = lax.axis_index(place.axes()) % group * size
    part = lax.dynamic_slice_in_dim(full, start, size, dim)
    if place.weight.gather is None or is_quantized(place.weight.gather):
        return part
    smaller = jnp.dtype(place.weight.gather).itemsize < part.dtype.itemsize
    return cast(part, place.weight.gather) if smaller else part


@jax.named_scope(ALL_GATHER)
def join_parts(part: jax.Array, place: Placement, group: int) -> jax.Array:
    """Reverses ``take_part``: gathers in groups, and casts for the layer."""
    if place.sharding.dim is None:
        return part
    dim, axes, group = (
        part.ndim + place.sharding.dim,
        place.axes(),
        min(group, place.shards()),
    )
    groups = np.arange(place.shards()).reshape(-1, group).tolist()
    if group > 1:
        part = quantized.all_gather_values(part, dim, axes, groups)
    return cast(place.without_padding(part), place.weight.compute)


def _forward(shard: Any, place: Placement) -> tuple[jax.Array, Any]:
    like = jnp.zeros(0, shard.dtype) if place.gradient.trainable else None
    return all_gather(shard, place), like


def _backward(place: Placement, like: Any, grad: Any) -> tuple[Any]:
    """Scatters and sums, each in its own dtype.

    A unit has a backward of its own, but derivatives of that one come here, too.
    """
    if not place.gradient.trainable:
        return (None,)
    return (all_reduce_in_unit(scatter(grad, place), place, like.dtype),)


all_gather.defvjp(_forward, _backward)

# gather(shards, places) -> full weights. A partial: it adds no stack frame.
gather: Callable[..., Any] = functools.partial(
    jax.tree.map, all_gather, is_leaf=lambda x: isinstance(x, ScaledShard)
)
