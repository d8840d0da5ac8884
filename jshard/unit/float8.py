"""Chooses a unit's weights for float8 products, and scales them.

A weight has one scale on all devices, so its shards need the largest magnitude among
them: one all-reduce a unit, for all its weights and for all layers of a Stack.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives.quantized import tensor_scale
from jshard.fsdp.mesh import shard_axes
from jshard.fsdp.precision import is_float
from jshard.layout.placement import Placement
from jshard.unit.linearize import TracedLayer
from jshard.unit.parameters import Parameters
from jshard.unit.products import E4M3, multiplied_only


def in_float8(
    own: Parameters, traced: TracedLayer, *, stacked: bool = False
) -> tuple[Parameters, TracedLayer]:
    """Returns a unit that gathers the weights of float8 products in float8.

    These are the weights that ``Precision.products`` allows and that the unit only
    multiplies with. The scales become the last of the unit's parameters. If
    ``stacked``, the unit is a Stack: ``own`` are all layers' shards, ``traced`` is one.
    """
    weights = traced.inputs.weights
    candidates = [
        place.float8 and is_float(weight) and len(weight.shape) >= 2
        for place, weight in zip(own.places, weights, strict=True)
    ]
    leaves = jax.tree.leaves(traced.inputs)[: len(traced.jaxpr.invars)]
    chosen = multiplied_only(traced.jaxpr, traced.consts, leaves, candidates)
    if not any(chosen):
        return own, traced
    places, scaled = list(own.places), []
    grads: list[Any] = [None] * len(weights)
    for i in itertools.compress(range(len(weights)), chosen):
        grads[i] = jax.ShapeDtypeStruct(weights[i].shape, weights[i].dtype)
        places[i] = dataclasses.replace(
            places[i], gather=jnp.dtype(E4M3), compute=None, scale=len(scaled)
        )
        scaled.append(own.shards[i])
    scales = _scales(scaled, stacked)
    own = Parameters([*own.shards, scales], [*places, Placement(None, trainable=False)])
    inputs = traced.inputs._replace(weights=own.weight_types(layer=stacked))
    return own, dataclasses.replace(traced, inputs=inputs, grads=grads)


def _scales(shards: Sequence[jax.Array], stacked: bool) -> jax.Array:
    """Returns the scales of full weights, (weights,), or (L, weights) if stacked."""
    # The largest magnitude has no gradient.
    magnitudes = [jnp.abs(lax.stop_gradient(shard)) for shard in shards]
    over = [range(1 if stacked else 0, x.ndim) for x in magnitudes]
    largest = [jnp.max(x, axis=tuple(o)) for x, o in zip(magnitudes, over, strict=True)]
    together = jnp.stack([x.astype(jnp.float32) for x in largest], axis=-1)
    return tensor_scale(lax.pmax(together, shard_axes()), E4M3)
