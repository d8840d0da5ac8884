"""DoRA's magnitudes of a new state: the norms of its weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.layout.four_bit.base import over_layers
from jshard.sharding.layout.memory_kinds import on_device
from jshard.sharding.layout.padding import exact, pad
from jshard.sharding.settings.state import TrainState

MAGNITUDE = "lora_m"  # the name of the parameter


def column_norms(kernel: jax.Array) -> jax.Array:
    """Returns the norm of each column of a matrix, in float32 or wider."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    return jnp.linalg.norm(kernel.astype(wide), axis=-2)


def start_magnitudes(state: TrainState, frozen: Any, mesh: Any) -> TrainState:
    """Returns a new, traced state whose magnitudes are the norms of its weights.

    These may be in 4 bits, and are those in ``frozen`` if the state will have others
    than its own; one layer of one exists at a time.
    """
    trees = (state.params, state.frozen if frozen is None else frozen)
    flat = {path: x for tree in trees for path, x in nnx.to_flat_state(tree)}

    def start(path: tuple, variable: Any) -> Any:
        if path[-1] != MAGNITUDE:
            return variable
        kernel = exact(jax.tree.map(on_device, flat[*path[:-1], "kernel"]), mesh)
        norms = over_layers(column_norms, kernel)
        return variable.copy(norms.astype(variable.get_value().dtype))

    params = pad(nnx.map_state(start, state.params), mesh)
    return dataclasses.replace(state, params=params)
