"""Linen models as they are, with units by type.

A Linen model is one function of one tree of parameters, ``module.apply``. ``Model``
holds that tree as Flax NNX Variables, so that ``FSDP`` shards, trains and saves it, and
calls the function with Linen's own interceptors around it: a call of a unit gathers
the unit's parameters, runs it on them, and drops them.
"""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.extend import core

from jshard.compat.jaxprs import needed_for
from jshard.errors import UserError
from jshard.layout.layer_dims import layer_dims, mark_layers
from jshard.layout.variables import variables
from jshard.linen.unit_calls import (
    Parameters,
    Path,
    leaks,
    outside_of_units,
    read_tree,
    recorder,
    runner,
)
from jshard.unit.calls import combine, partition
from jshard.unit.modules import Unit
from jshard.unit.shards import is_shard, shard_of


class Model(nnx.Module):
    """A Linen module with its parameters, for ``FSDP``.

    ``model(*args, **kwargs)`` is ``module.apply`` on them, and
    ``nnx.to_pure_dict(nnx.state(model, nnx.Param))`` is Linen's ``{"params": ...}``.

    Layers may be in a list, or under ``nn.scan`` with parameters stacked along axis 0:
    then each layer is gathered in the loop. ``nn.remat`` may be around either. The
    outermost unit counts: a layer's parameters are gathered together. Parameters in no
    unit are the root.

    Args:
      module: the Linen module.
      *inputs: what ``module.init`` takes, to make parameters or to find their units.
      units: types of submodules, such as layers, that gather their own parameters.
      rngs: random streams; "params" makes the parameters.
      params: parameters that exist, Linen's tree; by default new ones.
      streams: names of the random streams that calls need, such as "dropout". Like all
        plain random streams they depend on the mesh.
      **kwargs: of ``module.init``.

    Raises:
      UserError: a type has no submodules, the module has variables other than
        parameters, or parameters are stacked along another axis.
    """

    def __init__(
        self,
        module: linen.Module,
        *inputs: Any,
        units: tuple[type, ...],
        rngs: nnx.Rngs,
        params: Mapping[str, Any] | None = None,
        streams: tuple[str, ...] = (),
        **kwargs: Any,
    ):
        found: dict[Path, Any] = {}

        def init(key: jax.Array) -> Any:
            with linen.intercept_methods(recorder(units, found)):
                return linen.meta.unbox(module.init(key, *inputs, **kwargs))

        if params is None:
            made = init(rngs.params())
        else:
            made = {**jax.eval_shape(init, jax.random.key(0)), "params": params}
        if others := made.keys() - {"params"}:
            raise UserError(
                f"jshard.linen: {type(module).__name__} has variables other than "
                f"parameters ({', '.join(sorted(others))}), which have no place in it; "
                "wrap its layers in nnx.bridge.ToNNX"
            )
        if absent := set(units) - {kind for kind, _ in found.values()}:
            names = ", ".join(sorted(kind.__name__ for kind in absent))
            raise UserError(
                f"jshard.linen: units= holds {names}, of which "
                f"{type(module).__name__} has no submodule with parameters"
            )
        self.module, self.unit_types = module, tuple(units)
        self.streams = nnx.Rngs(**{s: rngs() for s in streams}) if streams else None
        outermost = {
            path: shapes
            for path, (_, shapes) in found.items()
            if not any(path[:i] in found for i in range(len(path)))
        }
        self.params = _tree(made["params"], (), outermost)
        self.unit_paths = tuple(outermost)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what ``module.apply`` does."""
        units: dict[Path, Any] = {
            path: functools.reduce(getattr, path, self.params)
            for path in self.unit_paths
        }
        if self.streams is not None:
            kwargs["rngs"] = {name: stream() for name, stream in self.streams.items()}
        if any(unit.unit_policy is not None for unit in units.values()):
            return self._in_step(units, args, kwargs)
        tree = {"params": read_tree(self.params)}
        return self.module.apply(tree, *args, **kwargs)

    def _in_step(self, units: dict[Path, Any], args: tuple, kwargs: dict) -> Any:
        """Returns what ``module.apply`` does, each unit run on its own parameters.

        A unit's call reads its own shards, so what the module sees of them outside of
        the unit is mostly not read, and stands for what is gathered only if it is.
        """
        sharded = [
            (path, variable)
            for path, variable in variables(self.params)
            if is_shard(variable)
        ]

        def run(arrays: list[jax.Array]) -> Any:
            seen = {id(v): x for (_, v), x in zip(sharded, arrays, strict=True)}
            read = lambda v: seen[id(v)] if id(v) in seen else v.get_value()
            tree = {"params": read_tree(self.params, read)}
            with linen.intercept_methods(runner(self.unit_types, units)):
                return partition(self.module.apply(tree, *args, **kwargs))

        outside = [outside_of_units(variable) for _, variable in sharded]
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(outside)
        stacked = [layer_dims(variable) > 0 for _, variable in sharded]
        leaking = leaks(traced.jaxpr, stacked)
        for (path, _), leaks_here in zip(sharded, leaking, strict=True):
            if leaks_here:
                raise UserError(
                    f"jshard.linen: parameter {'.'.join(path)!r}, stacked by nn.scan, "
                    "is read outside of its unit, where there is only a shard; read it "
                    "in a method of the unit, or leave that type out of units="
                )
        _, used = needed_for(traced.jaxpr, [True] * len(traced.out_avals))
        for i, (_, variable) in enumerate(sharded):
            shard = shard_of(variable)
            if used[i] and not stacked[i] and shard is not None:
                outside[i] = shard.whole()
        leaves = core.jaxpr_as_fun(traced)(*outside)
        return combine(*jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def _tree(params: Mapping[str, Any], path: Path, units: Mapping[Path, Any]) -> Any:
    """Returns the node of a tree of parameters; at the path of a unit, a Unit."""
    node = Parameters()
    for name, value in params.items():
        if isinstance(value, Mapping):
            value = _tree(value, (*path, name), units)
        else:
            value = nnx.Param(value)
        setattr(node, name, value)
    if path not in units:
        return node
    for inner, variable in variables(node):
        shape = jnp.shape(variable.get_value())
        own = functools.reduce(operator.getitem, inner, units[path])
        layers = len(shape) - len(own)
        if shape[layers:] != own:
            raise UserError(
                f"jshard.linen: {'.'.join((*path, *inner))} has shape {list(shape)}, "
                f"and {list(own)} in a layer: layers must be stacked along axis 0 "
                "(variable_axes={'params': 0})"
            )
        if layers:
            mark_layers(variable, inner=[inner] * layers)
    return Unit(node)
