"""Gathers a unit's weights for float8 products in float8, with one scale each.

A weight has one scale on all devices, so its shards need the largest magnitude among
them: one all-reduce a unit, for all its weights and for all layers of a Stack.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives.quantized import tensor_scale
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

    The shards of these, each with its scale, become parameters that are not trained,
    and are rounded as they are gathered. The parameters themselves are not gathered,
    and take the gradients. The scales are the last parameter, too: what depends on
    weights alone is not kept for the backward. With ``stacked``, the unit is a Stack,
    and its shards are (L, ...).
    """
    chosen = [
        lax.stop_gradient(shard)
        for shard, place in zip(shards, places, strict=True)
        if place.float8
    ]
    if not chosen:
        return fn, shards, places
    scales = _scales(chosen, stacked)
    scaled = [(shard, scales[..., i]) for i, shard in enumerate(chosen)]
    as_values = {"gather": jnp.dtype(E4M3), "compute": None, "trainable": False}
    places_of_values = [dataclasses.replace(p, **as_values) for p in places if p.float8]
    kept = [dataclasses.replace(p, gradient_only=p.float8) for p in places]
    place_of_scales = Placement(None, trainable=False)

    def decoded(weights, xs, carry, args):
        weights, (*values, scales) = list(weights[: len(kept)]), weights[len(kept) :]
        rounded = zip(values, scales, strict=True)
        for i, place in enumerate(kept):
            if place.float8:
                weights[i] = Float8(*next(rounded), weights[i])
        return fn(weights, xs, carry, args)

    places = [*kept, *places_of_values, place_of_scales]
    return decoded, [*shards, *scaled, scales], places


def _scales(shards: Sequence[jax.Array], stacked: bool) -> jax.Array:
    """Returns the scales of full weights, (weights,), or (L, weights) if stacked."""
    largest = [
        jnp.max(jnp.abs(x), axis=tuple(range(int(stacked), x.ndim))) for x in shards
    ]
    together = jnp.stack([x.astype(jnp.float32) for x in largest], axis=-1)
    return tensor_scale(lax.pmax(together, shard_axes()), E4M3)
