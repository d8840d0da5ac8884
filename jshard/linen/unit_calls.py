"""Calls of a Linen module's units: each on parameters that it gathers itself.

Linen's interceptors find these calls. What a parameter is outside of its unit, where
there is only a shard, the dataflow of ``unit/`` tells.
"""

import functools
import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jshard.collectives.gather import all_gather
from jshard.fsdp.scopes import within
from jshard.layout.layer_dims import layer_dims
from jshard.unit.dataflow import dependencies, union
from jshard.unit.shards import shard_of, with_array

Path = tuple[str, ...]

# The name of a layer's shards where its unit takes them from a loop.
_LAYER = "jshard.linen: shards of a layer"

# Whether a unit is being run: modules inside of it are its own.
_IN_UNIT = ContextVar("_IN_UNIT", default=False)


class Parameters(nnx.Module):
    """A node of Linen's tree of parameters, under the names it has there."""

    def __call__(
        self, module: linen.Module, method: str, rngs: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Calls a method of a Linen module, which is not bound, on these parameters."""
        tree = {"params": read_tree(self)}
        with within(_IN_UNIT, True):
            return module.apply(tree, *args, method=method, rngs=rngs, **kwargs)


def read_tree(
    node: Parameters,
    read: Callable[[nnx.Variable], Any] = lambda variable: variable.get_value(),
) -> dict[str, Any]:
    """Returns Linen's tree, with what ``read`` returns of each Variable.

    This is no method, because a call of a Unit's method gathers.
    """
    return {
        name: read(value) if isinstance(value, nnx.Variable) else read_tree(value, read)
        for name, value in vars(node).items()
        if isinstance(value, (nnx.Variable, Parameters))
    }


def outside_of_units(variable: nnx.Variable) -> jax.Array:
    """Returns what stands for a sharded parameter outside of its unit.

    Linen may look at shapes, so there are zeros in its place. Under ``nn.scan`` the
    loop takes the shards of a layer.
    """
    shard = shard_of(variable)
    assert shard is not None
    if layer_dims(variable):
        return shard.array
    whole = jax.eval_shape(lambda x: all_gather(x, shard.place), shard.array)
    return jnp.zeros(whole.shape, whole.dtype)


def leaks(jaxpr: core.Jaxpr, stacked: list[bool]) -> list[bool]:
    """Returns which of the inputs that are stacked are read outside of their units.

    A unit takes its shards by their name (``_of_layer``). Every other way from a
    stacked parameter to an output is a read.
    """

    def rule(eqn: Any, _: list[int]) -> list[int] | None:
        return [0] if eqn.params.get("name") == _LAYER else None

    bits = [is_stacked << i for i, is_stacked in enumerate(stacked)]
    found = union(dependencies(jaxpr, bits, rule))
    return [bool(found >> i & 1) for i in range(len(stacked))]


def recorder(units: tuple[type, ...], found: dict[Path, Any]) -> Callable:
    """Returns an interceptor that notes the parameters' shapes of each unit."""

    def record(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        result, module = call(*args, **kwargs), context.module
        if type(module) in units and "params" in module.variables:
            params = linen.meta.unbox(module.variables["params"])
            found[module.path] = type(module), jax.tree.map(jnp.shape, params)
        return result

    return record


def runner(types: tuple[type, ...], units: dict[Path, Any]) -> Callable:
    """Returns an interceptor that runs calls of units by themselves."""

    def run(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        # What nn.scan or nn.remat made of a unit's type is not of that type.
        ours = type(module) in types and module.path in units
        if _IN_UNIT.get() or not ours or context.method_name == "setup":
            return call(*args, **kwargs)
        unit = _of_layer(units[module.path], module.variables["params"])
        rngs = {name: module.make_rng(name) for name in module.scope.rngs}
        plain = module.clone(parent=None)
        return unit(plain, context.method_name, rngs, args, kwargs)

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
