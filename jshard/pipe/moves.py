"""Once a step: parameters to the stages that need them, and gradients back.

At rest every parameter is sharded over "pipe", too, like on any mesh of as many
devices, so that optimizers, averages and checkpoints know nothing of stages. An
all-to-all takes the shards of a Stack's layers to their stages. What is outside of the
Stack is gathered over "pipe": then each stage has it, sharded over the other axes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.fsdp.mesh import PIPE
from jshard.fsdp.scopes import STAGES
from jshard.fsdp.state import ModelArrays
from jshard.layout.placement import Placement
from jshard.layout.state_layout import Layout
from jshard.pipe.stages import Stages


@jax.named_scope(STAGES)
def to_stages(
    arrays: ModelArrays, batch: Any, layout: Layout, stages: Stages
) -> tuple[ModelArrays, Any, Layout]:
    """Returns a device's arrays, its stage's examples, and the layout in a stage."""

    def move(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        place, shard = layout.places[path], variable.get_value()
        return variable.copy(_to_stage(shard, place, stages, stages.has(path)))

    params, frozen = (nnx.map_state(move, part) for part in arrays[:2])
    batch = jax.tree.map(_gather_examples, batch)
    places = {path: _in_stage(place, stages) for path, place in layout.places.items()}
    layout = dataclasses.replace(layout, places=places, stages=stages)
    return ModelArrays(params, frozen, arrays.model_state), batch, layout


@jax.named_scope(STAGES)
def from_stages(grads: nnx.State, layout: Layout, stages: Stages) -> nnx.State:
    """Returns gradients sharded as their parameters at rest, in ``layout``."""

    def move(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        place, grad = layout.places[path], variable.get_value()
        return variable.copy(_from_stage(grad, place, stages, stages.has(path)))

    return nnx.map_state(move, grads)


def _in_stage(place: Placement, stages: Stages) -> Placement:
    over = place.over and tuple(axis for axis in place.over if axis != PIPE)
    return dataclasses.replace(place, over=over, parts=stages.devices, sum_at="step")


def _to_stage(
    shard: jax.Array, place: Placement, stages: Stages, layers: bool
) -> jax.Array:
    rows, dim = stages.rows(), place.dim
    if not layers:
        return shard if dim is None else _gather(shard, shard.ndim + dim)
    if dim is None:
        return shard[jnp.asarray(rows)[lax.axis_index(PIPE)]]
    parts = shard[rows.reshape(-1)]
    return lax.all_to_all(parts, PIPE, 0, parts.ndim + dim, tiled=True)


def _from_stage(
    grad: jax.Array, place: Placement, stages: Stages, layers: bool
) -> jax.Array:
    dim = place.dim
    if not layers:  # what is not sharded is summed over all devices by the step
        if dim is None:
            return grad
        return lax.psum_scatter(
            grad, PIPE, scatter_dimension=grad.ndim + dim, tiled=True
        )
    if dim is None:
        rows = jnp.asarray(stages.rows())[lax.axis_index(PIPE)]
        zeros = jnp.zeros((stages.layers, *grad.shape[1:]), grad.dtype)
        return zeros.at[rows].add(grad)  # that of a repeated layer is 0
    parts = lax.all_to_all(grad, PIPE, grad.ndim + dim, 0, tiled=True)
    return parts[stages.row_of_layer()]


def _gather(x: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(x, PIPE, axis=dim, tiled=True)


def _gather_examples(x: jax.Array) -> jax.Array:
    """Returns the examples of all devices of a pipeline; scalars are the same."""
    if not x.ndim:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _gather(jax.random.key_data(x), 0)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _gather(x, 0)
