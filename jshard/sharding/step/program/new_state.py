"""What a new state is, whether it is made, traced or only shaped."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.layout.four_bit.base import in_four_bits
from jshard.sharding.layout.state_layout import Layout, padded
from jshard.sharding.layout.values.initial_values import mark_stacked, prepare
from jshard.sharding.layout.values.magnitudes import start_magnitudes
from jshard.sharding.pipeline.requirements import check_pipeline
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step import checks, given
from jshard.sharding.units.model import layer_paths, make_units
from jshard.sharding.update.end_of_step import first_fields
from jshard.system.errors import warn

if TYPE_CHECKING:
    from jshard.sharding.step.fsdp import FSDP


def creator(
    fsdp: "FSDP", make_model: Callable[[Any], nnx.Module], optimizer: Any, wrt: Any
) -> Callable[..., TrainState]:
    """Returns a function of the inputs of ``make_model``, and of ``frozen``."""
    given.check_optimizer(optimizer)

    def create(inputs: Any, frozen: Any = None) -> TrainState:
        policy, mesh = fsdp.policy, fsdp.mesh
        model = make_model(inputs)
        checks.check_units(model, fsdp.units)
        is_parameter = nnx.filterlib.to_predicate((wrt, nnx.Param))
        mark_stacked(model, fsdp.layer_dims, is_parameter)
        prepare(model, policy, mesh, fsdp.units, is_parameter)
        layers = layer_paths(model, fsdp.units)
        graphdef, *arrays = nnx.split(model, wrt, nnx.Param, ...)
        checks.check_trained(arrays[0])
        first = jnp.zeros((), jnp.int32)
        state = TrainState(first, *arrays, opt_state=(), graphdef=graphdef)
        state = in_four_bits(state, policy, mesh, layers)
        state = padded(state, policy, mesh, fsdp.tensor_splits)
        state = start_magnitudes(state, frozen, mesh)
        more = first_fields(policy, mesh, optimizer, state.params, first)
        return dataclasses.replace(state, **more)

    return create


def abstract(
    fsdp: "FSDP", create: Callable[..., TrainState], inputs: Any, optimizer: Any
) -> TrainState:
    """Returns the state of ``create(inputs)`` as ShapeDtypeStructs with shardings."""
    shapes = jax.eval_shape(create, inputs)
    checks.check_shapes(shapes, optimizer)
    model = nnx.merge(shapes.graphdef, *shapes.model_arrays, copy=True)
    make_units(model, fsdp.units)
    checks.check_model(model, fsdp.policy, fsdp.mesh)
    check_pipeline(shapes.model_arrays, fsdp.policy, fsdp.mesh)
    layout = Layout.of(shapes, fsdp.policy, fsdp.mesh, fsdp.tensor_splits)
    for surprise in checks.surprises(model, shapes, layout):
        if surprise not in fsdp.told:
            fsdp.told.add(surprise)
            warn(surprise)
    return layout.abstract(shapes)
