"""Stack and Unit: the Flax modules that place the gathers.

Outside a jshard step, both are ordinary modules. For a step, ``FSDP`` replaces every
parameter with a Shard and gives every Stack and Unit its UnitPolicy (``model.py``). A
unit that is called gathers the parameters that it owns: all but those of inner units.
A Unit *is* the module that it wraps, with a subclass that gathers first. A Stack is a
single layer whose variables have a leading layer dimension.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.collectives.embedding import is_cheaper, look_up
from jshard.sharding.collectives.in_float8 import in_float8
from jshard.sharding.collectives.shards import as_full, is_shard, shard_of
from jshard.sharding.float8.products import Float8
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.layout.placement import Placement
from jshard.sharding.layout.specs import is_table, mark_table
from jshard.sharding.layout.variables import (
    expose_arrays,
    is_variable,
    reachable,
    variables,
)
from jshard.sharding.settings.policy import UnitPolicy
from jshard.sharding.units import calls
from jshard.sharding.units.partition import combine, objects_in, partition
from jshard.sharding.units.stack import check_carry, make_scan, split_aux
from jshard.sharding.units.unit import run_unit
from jshard.system.compat.flax_modules import Derived, derived
from jshard.system.compat.jaxprs import Static
from jshard.system.errors import UserError

M = TypeVar("M", bound=nnx.Module)


# With pytree=False, Flax does not touch the module that an instance becomes.
class Unit(Derived, pytree=False):
    """A submodule that gathers its parameters when called and then releases them.

    ``Unit(module)`` keeps the attributes, methods, type and parameter paths of
    ``module``. Calls of its public methods gather, too.

    Args:
      module: the module to wrap; the Unit takes its place.
    """

    unit_policy: UnitPolicy | None = None

    if TYPE_CHECKING:

        def __new__(cls, module: M) -> M:
            """Returns a module of the same type, for type checkers."""
            return module

    def __init__(self, module: nnx.Module):
        if isinstance(module, (Unit, Stack)):
            raise UserError(f"{type(module).__name__} is a Unit or a Stack already")
        vars(self).clear()
        vars(self).update(vars(module))
        become(self, unit_class(type(module)))
        mark_table(self)


class Stack(Derived, pytree=False):
    """Equal layers with stacked parameters, applied by a scan, gathered one by one.

    ``stack(x, *args, **kwargs)`` calls each layer with these arguments, ``x`` being
    what the layer before returned. If layers return ``x``, so does the stack. If they
    return ``(x, aux)``, the stack returns ``(x, aux)`` with aux stacked. A Stack has
    the attributes of a layer, with variables of shape (L, ...).

    Args:
      make_layer: makes one layer from its own ``nnx.Rngs``.
      num_layers: the number of layers, at least 1.
      rngs: random streams, split by layer.

    Raises:
      UserError: ``num_layers`` is below 1, or layers have no arrays, or are Units or
        Stacks themselves.
    """

    unit_policy: UnitPolicy | None = None
    run_layers: Callable | None = None  # of a pipeline; else ``make_scan``

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns a layer's attribute, with stacked variables."""

    def __init__(
        self,
        make_layer: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        rngs: nnx.Rngs,
    ):
        if num_layers < 1:
            raise UserError(f"Stack: num_layers={num_layers} must be at least 1")

        # A scan, so that initialisers of whole matrices (orthogonal) see one layer.
        @nnx.split_rngs(splits=num_layers)
        @nnx.scan(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            layer = make_layer(rngs)
            expose_arrays(layer)
            return layer

        layers = make(rngs)
        stacked = list(variables(layers))
        if not stacked:
            raise UserError(
                f"Stack: a {type(layers).__name__} has no arrays, so there is nothing "
                f"to stack; call one {num_layers} times"
            )
        for path, variable in stacked:
            mark_layers(variable, outer=[path])
        if isinstance(layers, (Unit, Stack)):
            raise UserError(
                "Stack: its layers are Units or Stacks already; stack plain modules, "
                "which may hold Units and Stacks"
            )
        vars(self).clear()
        vars(self).update(vars(layers))
        become(self, _stack_class(type(layers)))

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the last layer's output, or (output, stacked aux)."""
        run, finish = prepare_layers(self, x, (args, kwargs))
        return finish(*run())[0]


def become(module: nnx.Module, cls: type) -> None:
    """Makes a module a Unit or a Stack, or a plain module again, in place.

    No other class changes at run time: only here does an object have to stay the same,
    for all that refers to it.
    """
    object.__setattr__(module, "__class__", cls)


@functools.cache
def unit_class(cls: type) -> type:
    """Returns the Unit of a type of module."""
    methods = {
        name: _gathering(member)
        for name, member in inspect.getmembers_static(cls, callable)
        # hasattr is True for __call__ on every class, because classes are callable.
        if name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        if not isinstance(member, (staticmethod, type))
    }
    return derived(cls.__name__, (Unit, cls), methods | {"plain_class": cls})


@functools.cache
def _stack_class(cls: type) -> type:
    members = {"__call__": Stack.__call__, "plain_class": cls}
    return derived(f"{cls.__name__}Stack", (Stack, cls), members)


def _gathering(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if self.unit_policy is None:
            return method(self, *args, **kwargs)
        return call_unit(self, method, args, kwargs, self.unit_policy)

    return call


def is_unit(value: Any) -> bool:
    """Returns whether ``value`` is a Unit or a Stack."""
    return isinstance(value, (Unit, Stack))


def own_paths(module: nnx.Module) -> set[tuple]:
    """Returns the paths of variables that are reachable outside of inner units.

    A parameter that an inner unit shares with ``module`` belongs to ``module``, even if
    its path leads through the inner unit.
    """
    reached = {id(x) for x in reachable(module, stop=is_unit) if is_variable(x)}
    return {path for path, v in variables(module) if id(v) in reached}


def make_plain(module: Any) -> None:
    """Undoes Unit or Stack, in place: restores the original class of the module."""
    vars(module).pop("unit_policy", None)
    vars(module).pop("run_layers", None)
    become(module, type(module).plain_class)


def open_unit(
    unit: nnx.Module,
) -> tuple[list[jax.Array], list[Placement], list[jax.Array], Callable]:
    """Splits a unit into its parameters, its other arrays and its structure.

    Returns:
      This device's shards of the parameters that the unit owns; their placements; its
      other arrays: shards of inner units, weights that are gathered outside, and state,
      in which earlier calls may have left what depends on parameters; and
      ``module(weights, rest=None)``, which returns the plain module. Without ``rest``
      its other Variables are the unit's own, so that updates to them persist.
    """
    paths = own_paths(unit)
    is_own = lambda path, v: path in paths and is_shard(v)
    graphdef, own, others = nnx.split(unit, is_own, ...)
    owned, tree = jax.tree.flatten(own, is_leaf=is_variable)
    shards = [shard for variable in owned if (shard := shard_of(variable))]
    rest, static = partition(others)

    def module(weights: list, rest: list | None = None) -> nnx.Module:
        weights = [
            dataclasses.replace(w, name=s.name)
            if isinstance(w, Float8)
            else s.place.decoded(w)
            for w, s in zip(weights, shards, strict=True)
        ]
        whole = map(as_full, owned, weights)
        inner = others if rest is None else combine(rest, static)
        plain = nnx.merge(graphdef, jax.tree.unflatten(tree, whole), inner)
        if is_unit(plain):  # the root is not
            make_plain(plain)
        return plain

    arrays, places = [s.array for s in shards], [s.place for s in shards]
    return arrays, places, rest, module


def call_unit(
    unit: Any, method: Callable, args: tuple, kwargs: dict, policy: UnitPolicy
) -> Any:
    """Returns ``method(unit, *args, **kwargs)``, run as one unit.

    What the method changes in the module, or in Variables that it is passed, changes.
    """
    shards, places, rest, module = open_unit(unit)
    if is_table(unit) and method is nnx.Embed.__call__:
        # A unit owns no shard if its table is shared or is gathered already.
        if shards and len(args) == 1 and not kwargs:
            (shard,), (place_of,), (ids,) = shards, places, args
            if is_cheaper(shard, place_of, ids):
                read = lambda table, ids: method(module([table], rest), ids)
                return look_up(read, shard, place_of, ids)
    parts = calls.parts_of(unit)
    paths = {id(part): path for path, part in parts.items()}
    modules = {path for path, part in parts.items() if isinstance(part, nnx.Module)}
    inputs, arguments = partition((args, kwargs), paths)
    originals = {**parts, **dict(enumerate(objects_in((args, kwargs), paths)))}

    def call(weights, rest, inputs, _):
        result, changes, changed, copies = calls.call_method(
            method, module(weights, rest), (), inputs, arguments
        )
        known = {i: key for i, key in copies.items() if key in originals}
        results, of_results = partition((result, changed), known)
        is_whole = lambda key: isinstance(key, int) or key in modules
        whole = {i: key for i, key in known.items() if is_whole(key)}
        arrays, static = partition(changes, whole)  # other parts are new
        return results, arrays, (of_results, static)

    of_unit = in_float8(call, shards, places, stacked=False)
    results, arrays, (of_results, static) = run_unit(*of_unit, rest, inputs, policy)
    result, changed = combine(results, of_results, originals)
    changes = combine(arrays, static, originals)
    calls.apply_changes(unit, changes, layers=False)
    for key, content in changed.items():
        calls.set_content(originals[key], content)
    return result


def prepare_layers(
    stack: Stack,
    x: Any,
    others: tuple[tuple, dict],
    beside: tuple[list[jax.Array], list[Placement]] = ([], []),
) -> tuple[Callable, Callable]:
    """Returns the functions ``run`` and ``finish`` for ``stack(x, *args, **kwargs)``.

    ``finish(*run())`` returns the result of the call and the full weights of
    ``beside``, gathered while the last layer runs. Outside a step ``run`` is a plain
    ``lax.scan``. Raises UserError if a layer changes the carry's shape or dtype, or a
    Variable that is passed to it.
    """
    shards, places, rest, module = open_unit(stack)
    extra, arguments = partition(others)
    carry = jax.tree.map(jnp.asarray, x)

    def layer(weights, rest, carry, extra):
        plain = module(weights, rest)
        method = type(plain).__call__
        result, changes, changed, _ = calls.call_method(
            method, plain, (carry,), extra, arguments
        )
        if changed:
            given = method, (x, *others[0]), others[1]
            what = calls.argument_name(*given, objects_in(others)[min(changed)])
            raise UserError(
                f"{type(plain).__name__}, a stacked layer, changes {what}, which all "
                "layers share; return what is new, or keep it in the layer (each layer "
                "its own nnx.Rngs, say)"
            )
        after, aux, has_aux = split_aux(result, carry)
        arrays, static = partition(changes)
        return (after, aux), arrays, (static, Static(has_aux))

    def finish(carry, ys, weights=()):
        aux, arrays, (static, has_aux) = ys
        calls.apply_changes(stack, combine(arrays, static), layers=True)
        return (carry, aux) if has_aux.value else carry, weights

    policy = stack.unit_policy
    if policy is not None:
        of_layers = in_float8(layer, shards, places, stacked=True)
        inputs = *of_layers, rest, carry, extra, policy
        run_layers = stack.run_layers or make_scan
        return run_layers(*inputs, beside=beside), finish

    def body(carry, rest):
        (out, aux), arrays, static = layer([], rest, carry, extra)
        check_carry(carry, out)
        return out, (aux, arrays, static)

    return functools.partial(jax.lax.scan, body, carry, rest), finish
