"""Gathers a unit's weights for float8 products in float8, and scales them.

A weight has one scale on all devices, so its shards need the largest magnitude among
them: one all-reduce a unit, for all its weights and for all layers of a Stack.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.comm.quantized import tensor_scale
from jshard.layout.placement import Placement
from jshard.mesh import shard_axes
from jshard.unit.linearize import TracedLayer
from jshard.unit.parameters import Parameters
from jshard.unit.products import E4M3, dequantized


def in_float8(
    own: Parameters, traced: TracedLayer, *, stacked: bool = False
) -> tuple[Parameters, TracedLayer]:
    """Returns a unit that gathers the weights of float8 products in float8.

    The scales become the last of the unit's parameters. If ``stacked``, the unit is a
    Stack: ``own`` are all layers' shards, ``traced`` is one.
    """
    if not any(place.float8 for place in own.places):
        return own, traced
    scaled, places = [], []
    for shard, place in zip(own.shards, own.places, strict=True):
        if place.float8:
            place = dataclasses.replace(
                place, gather=jnp.dtype(E4M3), compute=None, scale=len(scaled)
            )
            scaled.append(shard)
        places.append(place)
    dense = traced.inputs.weights

    def decode(weights: Sequence[Any], handles: Sequence[Any]) -> list[Any]:
        *weights, scales = weights
        for i, place in enumerate(places):
            if place.scale is not None:
                scale = scales[place.scale].astype(dense[i].dtype)
                weights[i] = dequantized(weights[i], scale)
            if handles[i] is not None:
                weights[i] = _with_gradient(weights[i], handles[i])
        return weights

    handles = [
        weight if place.float8 and is_trained else None
        for weight, place, is_trained in zip(dense, places, own.trained, strict=True)
    ]
    scales, place = _scales(scaled, stacked), Placement(None, trainable=False)
    own = Parameters([*own.shards, scales], [*places, place])
    inputs = traced.inputs._replace(weights=own.weight_types(layer=stacked))
    return own, dataclasses.replace(
        traced, inputs=inputs, handles=[*handles, None], decode=decode
    )


# A sum with zeros would stand between a weight and its product.
@jax.custom_vjp
def _with_gradient(weight: jax.Array, handle: jax.Array) -> jax.Array:
    """Returns the weight, whose gradient is the handle's."""
    return weight


_with_gradient.defvjp(lambda weight, _: (weight, None), lambda _, grad: (None, grad))


def _scales(shards: Sequence[jax.Array], stacked: bool) -> jax.Array:
    """Returns the scales of full weights, (weights,), or (L, weights) if stacked."""
    # The largest magnitude has no gradient.
    magnitudes = [jnp.abs(lax.stop_gradient(shard)) for shard in shards]
    over = [range(1 if stacked else 0, x.ndim) for x in magnitudes]
    largest = [jnp.max(x, axis=tuple(o)) for x, o in zip(magnitudes, over, strict=True)]
    together = jnp.stack([x.astype(jnp.float32) for x in largest], axis=-1)
    return tensor_scale(lax.pmax(together, shard_axes()), E4M3)
