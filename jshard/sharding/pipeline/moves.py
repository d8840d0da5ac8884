"""Once a step: parameters to the stages that need them, and gradients back.

In a state every parameter is sharded over "pipe", too, as on any mesh of as many
devices, so that optimizers, averages and checkpoints know nothing of stages. An
all-to-all takes the shards of a Stack's layers to their stages. What is outside of the
Stack is gathered over "pipe": then each stage has it, sharded over the other axes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.pipeline.stages import Stages
from jshard.sharding.settings.mesh import PIPE
from jshard.sharding.settings.scopes import STAGES
from jshard.sharding.settings.state import ModelArrays


@jax.named_scope(STAGES)
def to_stages(
    arrays: ModelArrays, batch: Any, layout: Layout, stages: Stages
) -> tuple[ModelArrays, Any, Layout]:
    """Returns a device's arrays, its stage's examples, and the layout in a stage."""
    move = functools.partial(_to_stages, layout, stages)
    params, frozen = move(arrays.params), move(arrays.frozen)
    batch = jax.tree.map(_gather_examples, batch)
    places = {}
    for path, place in layout.places.items():
        over = place.sharding.over
        over = over and tuple(axis for axis in over if axis != PIPE)
        sharding = dataclasses.replace(place.sharding, over=over, parts=stages.devices)
        gradient = dataclasses.replace(place.gradient, sum_at="step")
        places[path] = dataclasses.replace(place, sharding=sharding, gradient=gradient)
    layout = dataclasses.replace(layout, places=places, stages=stages)
    return ModelArrays(params, frozen, arrays.model_state), batch, layout


@jax.named_scope(STAGES)
def from_stages(
    grads: nnx.State, shards: nnx.State, layout: Layout, stages: Stages
) -> nnx.State:
    """Returns gradients sharded like the parameters of a state of ``layout``."""
    move = functools.partial(_to_stages, layout, stages)
    (grads,) = jax.linear_transpose(move, shards)(grads)
    return grads


def _to_stages(layout: Layout, stages: Stages, arrays: nnx.State) -> nnx.State:
    """Sends shards to their stages. What is not sharded is on all devices already."""
    rows = stages.rows()

    def move(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        shard, dim = variable.get_value(), layout.places[path].sharding.dim
        if not stages.has(path):
            return variable.copy(shard if dim is None else _gather(shard, dim))
        if dim is None:
            return variable.copy(shard[jnp.asarray(rows)[lax.axis_index(PIPE)]])
        parts = shard[rows.reshape(-1)]
        to_stage = lax.all_to_all(parts, PIPE, 0, parts.ndim + dim, tiled=True)
        return variable.copy(to_stage)

    return nnx.map_state(move, arrays)


def _gather(x: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(x, PIPE, axis=dim % x.ndim, tiled=True)


def _gather_examples(x: jax.Array) -> jax.Array:
    """Returns the examples of all devices of a pipeline; scalars are the same."""
    if not x.ndim:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _gather(jax.random.key_data(x), 0)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _gather(x, 0)
