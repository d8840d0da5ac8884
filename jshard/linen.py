"""Linen models as they are, with units by type.

A Linen model is one function of one tree of parameters, ``module.apply``. ``Model``
holds that tree as Flax NNX Variables, so that ``FSDP`` shards, trains and saves it, and
calls the function with Linen's own interceptors around it: a call of a unit gathers
the unit's parameters, runs it on them, and drops them.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jshard.errors import UserError
from jshard.layout.layers import layer_dims, mark_layers
from jshard.layout.variables import variables
from jshard.unit.modules import Unit
from jshard.unit.shards import shard_of, with_array

Path = tuple[str, ...]

# Whether a unit is being run: modules inside of it are its own.
_IN_UNIT = ContextVar("_IN_UNIT", default=False)


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
            with linen.intercept_methods(_recorder(units, found)):
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
        in_step = any(unit.unit_policy is not None for unit in units.values())
        read = _outside_of_units if in_step else _value
        if self.streams is not None:
            kwargs["rngs"] = {name: stream() for name, stream in self.streams.items()}
        tree = {"params": _read(self.params, read)}
        if not in_step:
            return self.module.apply(tree, *args, **kwargs)
        with linen.intercept_methods(_runner(self.unit_types, units)):
            return self.module.apply(tree, *args, **kwargs)


class _Parameters(nnx.Module):
    """A node of Linen's tree of parameters, under the names it has there."""

    def __call__(
        self, module: linen.Module, method: str, rngs: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Calls a method of a Linen module, which is not bound, on these parameters."""
        token = _IN_UNIT.set(True)
        try:
            tree = {"params": _read(self, _value)}
            return module.apply(tree, *args, method=method, rngs=rngs, **kwargs)
        finally:
            _IN_UNIT.reset(token)


def _read(node: _Parameters, read: Callable[[nnx.Variable], Any]) -> dict[str, Any]:
    """Returns Linen's tree, with what ``read`` returns of each Variable.

    This is no method, because a call of a Unit's method gathers.
    """
    return {
        name: read(value) if isinstance(value, nnx.Variable) else _read(value, read)
        for name, value in vars(node).items()
        if isinstance(value, (nnx.Variable, _Parameters))
    }


def _value(variable: nnx.Variable) -> Any:
    return variable.get_value()


def _outside_of_units(variable: nnx.Variable) -> Any:
    """Returns what the module sees of a parameter outside of its unit.

    A unit's call reads its own parameters. Before that Linen may look at shapes, so
    there are zeros in their place, which are never computed with. Under ``nn.scan``
    the loop takes the shards of a layer.
    """
    shard = shard_of(variable)
    if shard is None:
        return variable.get_value()
    if layer_dims(variable):
        return shard.array
    shape = list(shard.array.shape)
    if shard.place.dim is not None:
        shape[shard.place.dim] *= shard.place.shards()
    return jnp.zeros(shape, shard.array.dtype)


def _recorder(units: tuple[type, ...], found: dict[Path, Any]) -> Callable:
    """Returns an interceptor that notes the parameters' shapes of each unit."""

    def record(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        result, module = call(*args, **kwargs), context.module
        if type(module) in units and "params" in module.variables:
            params = linen.meta.unbox(module.variables["params"])
            found[module.path] = type(module), jax.tree.map(jnp.shape, params)
        return result

    return record


def _runner(types: tuple[type, ...], units: dict[Path, Any]) -> Callable:
    """Returns an interceptor that runs calls of units by themselves."""

    def run(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        # What nn.scan or nn.remat made of a unit's type is not of that type.
        ours = type(module) in types and module.path in units
        if _IN_UNIT.get() or not ours or context.method_name == "setup":
            return call(*args, **kwargs)
        unit = _with_arrays(units[module.path], module.variables["params"])
        rngs = {name: module.make_rng(name) for name in module.scope.rngs}
        plain = module.clone(parent=None)
        return unit(plain, context.method_name, rngs, args, kwargs)

    return run


def _with_arrays(unit: Any, arrays: Any) -> Any:
    """Returns a unit with the arrays of one layer in place of all layers' shards."""
    graphdef, state = nnx.split(unit)
    flat = nnx.to_flat_state(state)
    if not any(layer_dims(variable) for _, variable in flat):
        return unit
    layer = []
    for path, variable in flat:
        array = functools.reduce(operator.getitem, path, arrays)
        layer.append((path, with_array(variable, array)))
    return nnx.merge(graphdef, nnx.from_flat_state(layer))


def _tree(params: Mapping[str, Any], path: Path, units: Mapping[Path, Any]) -> Any:
    """Returns the node of a tree of parameters; at the path of a unit, a Unit."""
    node = _Parameters()
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
