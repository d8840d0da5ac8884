"""Shards unmodified Flax Linen models; ``units`` names the types of their layers.

A Linen model is one function of one tree of parameters, ``module.apply``. ``Model``
holds that tree as Flax NNX Variables, so that ``FSDP`` shards, trains and saves it, and
calls the function with Linen's own interceptors around it: a call of a unit gathers
the unit's parameters, runs the unit, and releases them. Which parameters the model
reads outside of their unit, where it has only shards, is found in the traced program.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core.scope import subtract_filters
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.collectives.shards import is_shard, shard_of, with_array
from jshard.sharding.layout.layer_dims import layer_dims, mark_layers
from jshard.sharding.layout.variables import variables
from jshard.sharding.settings.scopes import within
from jshard.sharding.units.calls import call_method, set_content
from jshard.sharding.units.modules import Unit
from jshard.sharding.units.partition import combine, objects_in, partition
from jshard.system.compat.jaxprs import needed_for
from jshard.system.compat.programs.dataflow import dependencies, union
from jshard.system.errors import UserError

Path = tuple[str, ...]

# The name of a layer's shards where its unit takes them from a loop.
_LAYER = "jshard.linen: shards of a layer"

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
        found: dict[Path, Any] = {}  # units: their types, and shapes of parameters

        def record(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            result, unit = call(*args, **kwargs), context.module
            if type(unit) in units and "params" in unit.variables:
                own = linen.meta.unbox(unit.variables["params"])
                found[unit.path] = type(unit), jax.tree.map(jnp.shape, own)
            return result

        def init(key: jax.Array) -> Any:
            with linen.intercept_methods(record):
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
        tree = {"params": _read_tree(self.params)}
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

        capture = kwargs.get("capture_intermediates", False)
        inputs, arguments = partition((args, kwargs))
        originals = dict(enumerate(objects_in((args, kwargs))))

        def run(arrays: list[jax.Array]) -> Any:
            seen = {id(v): x for (_, v), x in zip(sharded, arrays, strict=True)}
            read = lambda v: seen[id(v)] if id(v) in seen else v.get_value()
            tree = {"params": _read_tree(self.params, read)}

            @functools.wraps(type(self.module).__call__)
            def apply(_: Any, *args: Any, **kwargs: Any) -> Any:
                return self.module.apply(tree, *args, **kwargs)

            with linen.intercept_methods(_runner(self.unit_types, units, capture)):
                called = call_method(apply, self, (), inputs, arguments)
            result, _, changed, copies = called
            known = {i: key for i, key in copies.items() if key in originals}
            return partition((result, changed), known)

        outside = [_outside_of_units(variable) for _, variable in sharded]
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(outside)
        stacked = [layer_dims(variable) > 0 for _, variable in sharded]
        leaking = _leaks(traced.jaxpr, stacked)
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
        arrays, rest = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        result, changed = combine(arrays, rest, originals)
        for key, content in changed.items():
            set_content(originals[key], content)
        return result


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


class Parameters(nnx.Module):
    """A node of Linen's tree of parameters, under the names it has there."""

    def __call__(
        self, module: linen.Module, state: Any, options: dict, args: tuple, kwargs: dict
    ) -> tuple[Any, Any]:
        """Applies a Linen module, which is not bound, to these parameters.

        ``state`` are its other variables, ``options`` of ``apply``. Returns the result
        and the variables that were mutable.
        """
        tree = {"params": _read_tree(self), **state}
        with within(_IN_UNIT, True):
            return module.apply(tree, *args, **options, **kwargs)


def _read_tree(
    node: Parameters,
    read: Callable[[nnx.Variable], Any] = lambda variable: variable.get_value(),
) -> dict[str, Any]:
    """Returns Linen's tree, with what ``read`` returns of each Variable.

    This is no method, because a call of a Unit's method gathers.
    """
    tree = {}
    for name, value in vars(node).items():
        if isinstance(value, nnx.Variable):
            tree[name] = read(value)
        elif isinstance(value, Parameters):
            tree[name] = _read_tree(value, read)
    return tree


def _outside_of_units(variable: nnx.Variable) -> jax.Array:
    """Returns what stands for a sharded parameter outside of its unit.

    Linen may look at shapes, so there are zeros in its place. Under ``nn.scan`` the
    loop takes the shards of a layer.
    """
    shard = shard_of(variable)
    assert shard is not None
    if layer_dims(variable):
        return shard.array
    gathered = functools.partial(all_gather, place=shard.place)
    return jnp.zeros_like(jax.eval_shape(gathered, shard.array))


def _leaks(jaxpr: core.Jaxpr, stacked: list[bool]) -> list[bool]:
    """Returns which of the inputs that are stacked are read outside of their units.

    A unit takes its shards by their name (``_of_layer``). Every other way from a
    stacked parameter to an output is a read.
    """

    def rule(eqn: Any, _: list[int]) -> list[int] | None:
        return [0] if eqn.params.get("name") == _LAYER else None

    bits = [is_stacked << i for i, is_stacked in enumerate(stacked)]
    found = union(dependencies(jaxpr, bits, rule))
    return [bool(found >> i & 1) for i in range(len(stacked))]


def _runner(
    types: tuple[type, ...], units: dict[Path, Any], capture: Any = False
) -> Callable:
    """Returns an interceptor that runs calls of units by themselves.

    ``capture`` is ``capture_intermediates`` of ``apply``.
    """

    def inner(module: linen.Module, method: str) -> bool:
        """Returns whether to capture what a module in a unit, not the unit, returns."""
        wanted = method == "__call__" if capture is True else capture(module, method)
        return bool(module.path and wanted)

    def run(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        # What nn.scan or nn.remat made of a unit's type is not of that type.
        ours = type(module) in types and module.path in units
        if _IN_UNIT.get() or not ours or context.method_name == "setup":
            return call(*args, **kwargs)
        state, scope = dict(module.variables), module.scope
        unit = _of_layer(units[module.path], state.pop("params"))
        options = {
            "method": context.method_name,
            "rngs": {name: module.make_rng(name) for name in scope.rngs},
            "mutable": subtract_filters(scope.mutable, "params"),
            "capture_intermediates": capture and inner,
        }
        plain = module.clone(parent=None)
        result, state = unit(plain, state, options, args, kwargs)
        for collection, values in state.items():
            for name, value in values.items():
                scope.put_variable(collection, name, value)
        return result

    return run


def _of_layer(unit: Any, arrays: Any) -> Any:
    """Returns a unit with the arrays of one layer in place of all layers' shards."""
    graphdef, state = nnx.split(unit)
    flat = nnx.to_flat_state(state)
    if not any(layer_dims(variable) for _, variable in flat):
        return unit
    layer = []
    for path, variable in flat:
        array = functools.reduce(operator.getitem, path, arrays)
        layer.append((path, with_array(variable, checkpoint_name(array, _LAYER))))
    return nnx.merge(graphdef, nnx.from_flat_state(layer))
