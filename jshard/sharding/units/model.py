"""The model of a step: every parameter a Shard, every unit with its policy.

``FSDP`` builds it anew, over a device's shards, each time a step is traced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.collectives.shards import as_full, as_shard, shard_of
from jshard.sharding.float8.products import fits, take_float8
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.placement import Placement
from jshard.sharding.layout.variables import replace, variables
from jshard.sharding.settings.mesh import AXES, manual_axes, names_of
from jshard.sharding.settings.policy import Policy, Reshard, UnitPolicy
from jshard.sharding.settings.precision import own_dtype, set_compute_dtype
from jshard.sharding.units.modules import (
    Stack,
    Unit,
    become,
    call_unit,
    is_unit,
    own_paths,
    unit_class,
)
from jshard.system.errors import UserError

# As Units of their own these are heads and embeddings, without float8 products.
_SINGLE = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Embed)


def make_units(model: nnx.Module, units: tuple[type, ...]) -> None:
    """Turns every submodule with a type in ``units`` into a Unit, in place."""
    for path, module in list(nnx.iter_modules(model)):
        if path and isinstance(module, units) and not is_unit(module):
            become(module, unit_class(type(module)))


def layer_paths(model: nnx.Module, units: tuple[type, ...] = ()) -> list[tuple]:
    """Returns the paths of Stacks and Units, but not of heads and embeddings.

    ``units`` are types whose instances will become Units.
    """
    return [
        path
        for path, module in nnx.iter_modules(model)
        if path and (is_unit(module) or isinstance(module, units))
        if isinstance(module, Stack) or not isinstance(module, _SINGLE)
    ]


def make_sharded(
    model: nnx.Module,
    policy: Policy,
    placements: dict[tuple, Placement],
    run_layers: Callable | None = None,
) -> None:
    """Replaces every parameter with a Shard and gives every unit its policy.

    ``run_layers`` takes the place of ``make_scan`` in the Stack of a pipeline.
    """
    modules = list(nnx.iter_modules(model))
    units = [path for path, module in modules if is_unit(module)]
    layers = layer_paths(model)
    multiplied: dict[tuple, tuple[int, ...]] = {}  # sums over these, in float8
    for path, module in modules:
        over_all_devices(module)
        in_layer = any(path[: len(layer)] == layer for layer in layers)
        if in_layer and policy.products():
            multiplied |= {(*path, name): over for name, over in take_float8(module)}
        precision = policy.precision_at(path, own_dtype(module))
        set_compute_dtype(module, precision.compute)
        if isinstance(module, (Unit, Stack)):
            of_unit = policy.unit(path)
            # A prefetched weight passes a barrier with activations, so it depends on
            # them, and the remat of an outer unit would keep it as a residual.
            if any(path[: len(unit)] == unit for unit in units if unit != path):
                of_unit = dataclasses.replace(of_unit, prefetch=False)
            module.unit_policy = of_unit
            if run_layers is not None and isinstance(module, Stack):
                module.run_layers = run_layers
    sharded: dict[int, nnx.Variable] = {}
    for path, variable in variables(model):
        if path in placements:
            placement = placements[path]
            if placement.weight.float8:
                gather = functools.partial(all_gather, place=placement)
                shape = jax.eval_shape(gather, variable.get_value()).shape
                over, depth = multiplied.get(path), layer_dims(variable)
                kind = placement.weight.float8
                parts = (
                    placement.part.whole and placement.part.splits
                )  # with scales of their own
                if over is None or parts or not fits(shape[depth:], over, kind):
                    kind = None
                weight = placement.weight
                weight = dataclasses.replace(weight, float8=kind, summed=over or ())
                placement = dataclasses.replace(placement, weight=weight)
            name = ".".join(map(str, path))
            sharded[id(variable)] = as_shard(variable, placement, name)
    replace(model, sharded)


def decide_for_training(model: nnx.Module) -> None:
    """Sets the modes that nobody set, like those of ``nnx.MultiHeadAttention``.

    Others stay: frozen statistics, or a backbone after ``.eval()``.
    """
    for _, module in nnx.iter_modules(model):
        for mode in ("deterministic", "use_running_average"):
            if getattr(module, mode, False) is None:
                setattr(module, mode, False)


def gather_root(model: nnx.Module) -> None:
    """Gathers the parameters that the root module owns, in place."""
    own, gathered = own_paths(model), {}
    for path, variable in variables(model):
        if path in own and (shard := shard_of(variable)):
            gathered[id(variable)] = as_full(variable, shard.gathered())
    replace(model, gathered)


def root_as_unit(fn: Callable, reshard: Reshard) -> Callable:
    """Returns ``fn(model, *args)`` as one Unit that owns the root's parameters.

    If ``reshard`` is False, the root is gathered already, and this is ``fn`` itself.
    """
    if reshard is False:
        return fn
    policy = UnitPolicy("none", reshard_after_forward=reshard)
    return lambda model, *args: call_unit(model, fn, args, {}, policy)


def over_all_devices(module: Any) -> None:
    """Makes an ``nnx.BatchNorm`` take its statistics over all devices of a step.

    Raises:
      UserError: it names an axis that a step has not, as models for ``pmap`` do.
    """
    if not isinstance(module, nnx.BatchNorm):
        return
    if module.axis_name is None:
        module.axis_name = manual_axes() or AXES[:2]  # pyright: ignore[reportAttributeAccessIssue]
    if not {*names_of(module.axis_name)} <= {*AXES}:
        raise UserError(
            f"nnx.BatchNorm(axis_name={module.axis_name!r}): a step has no such axis; "
            "leave axis_name out, and statistics are those of the whole batch, over "
            "all devices"
        )


def of_one_device(model: nnx.Module) -> nnx.Module:
    """Undoes ``over_all_devices``, for calls outside a step, without mesh axes."""
    for _, x in list(nnx.iter_modules(model)):
        if isinstance(x, nnx.BatchNorm) and {*names_of(x.axis_name)} <= {*AXES}:
            x.axis_name = None
    return model
