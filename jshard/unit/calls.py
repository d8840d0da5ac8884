"""Calls a module's method as a function: what it changes leaves as a result."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.compat.flax_modules import is_pytree
from jshard.compat.jaxprs import Static
from jshard.errors import UserError
from jshard.float8.products import Float8
from jshard.layout.layer_dims import mark_layers
from jshard.layout.variables import is_variable, reachable, set_attribute
from jshard.unit.shards import is_shard, shard_of, with_array

# (path of a module, name of an attribute) -> its new value
Changes = dict[tuple[tuple[str, ...], str], Any]

_ABSENT = object()  # the value of an attribute that was deleted


def variables_in(tree: Any) -> list[nnx.Variable]:
    """Returns all Variables in a pytree and its modules, except sharded parameters."""
    return [x for x in reachable(tree) if is_variable(x) and not is_shard(x)]


def call_method(
    method: Callable, module: nnx.Module, args: tuple, kwargs: dict
) -> tuple[Any, Changes, dict[int, Any]]:
    """Calls ``method(module, *args, **kwargs)`` and collects what it changed.

    Returns:
      The result; the attributes of the module and its submodules that were set, created
      or deleted, or whose Variable has another value; and the new values of Variables
      in the arguments, by index in ``variables_in((args, kwargs))``.

    Raises:
      UserError: an attribute was set to what JAX cannot return from a traced function.
    """
    passed = variables_in((args, kwargs))
    passed_before = [variable.get_raw_value() for variable in passed]
    own_containers(module)
    before = {path: (m, _contents(m)) for path, m in _modules(module)}
    result = method(module, *args, **kwargs)
    changes: Changes = {}
    for path, (own, old) in before.items():
        new = _contents(own)
        for name in dict.fromkeys((*old, *new)):
            if _same(old.get(name, []), new.get(name, [])):
                continue
            value = vars(own).get(name, _ABSENT)
            if is_variable(value) and isinstance(value.get_raw_value(), Float8):
                continue  # a transform of Flax sets all that it was given
            for x in reachable(value):
                if isinstance(x, nnx.Module) and not is_pytree(type(x)):
                    raise UserError(
                        f"{type(own).__name__}.{name} is set, within a jshard unit, to "
                        f"a {type(x).__name__}, which is no pytree, so its arrays "
                        "cannot leave the unit; make it where the model is made"
                    )
            changes[path, name] = value
    changed = {
        i: variable.get_value()
        for i, variable in enumerate(passed)
        if variable.get_raw_value() is not passed_before[i]
    }
    return result, changes, changed


def own_containers(module: nnx.Module) -> None:
    """Copies the lists, dicts and sets that a merged module shares with its structure.

    What a call appends to them would otherwise be there in the next trace, too.
    """
    for _, own in _modules(module):
        for name, value in vars(own).items():
            if isinstance(value, (list, dict)):
                vars(own)[name] = jax.tree.map(lambda x: x, value, is_leaf=_is_opaque)
            elif isinstance(value, set):
                vars(own)[name] = set(value)


def _is_opaque(x: Any) -> bool:
    return not isinstance(x, (list, dict, tuple))


def apply_changes(module: nnx.Module, changes: Changes, *, layers: bool) -> None:
    """Makes the changes that ``call_method`` returned, in place.

    With ``layers``, the module is a Stack, and new values are those of its layers.
    """
    modules = dict(_modules(module))
    for (path, name), value in changes.items():
        owner = modules[path]
        old: Any = vars(owner).get(name)
        if is_variable(value) and value.get_raw_value() is None:
            continue  # a weight that is unchanged (``trace_layer``)
        if value is _ABSENT:
            delattr(owner, name)
        elif is_variable(old) and is_variable(value):
            old.set_raw_value(value.get_raw_value())
        else:
            if is_variable(value) and layers:
                mark_layers(value, outer=[(*path, name)])
            set_attribute(owner, name, value)


def _modules(
    module: Any, path: tuple[str, ...] = (), seen: frozenset[int] = frozenset()
) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
    """Yields ``module`` and all modules within it, with their paths."""
    yield path, module
    seen |= {id(module)}
    for name, value in vars(module).items():
        inside = isinstance(value, nnx.Pytree) and not is_variable(value)
        if inside and id(value) not in seen:
            yield from _modules(value, (*path, name), seen)


def _contents(module: nnx.Module) -> dict[str, list[Any]]:
    """Returns what tells whether an attribute has changed."""
    return {
        name: _parts(value)
        for name, value in vars(module).items()
        if not name.startswith(("_pytree__", "_object__"))
    }


def _parts(value: Any) -> list[Any]:
    """Returns the structures in a value, to be compared, and its objects."""
    leaves, structure = jax.tree.flatten(value, is_leaf=_is_opaque)
    parts: list[Any] = [structure]
    for leaf in leaves:
        if is_variable(leaf):
            parts += [type(leaf), *_parts(leaf.get_raw_value())]
        elif isinstance(leaf, set):
            parts += leaf
        else:
            parts.append(leaf)
    return parts


def _same(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        a is b or (isinstance(a, jax.tree_util.PyTreeDef) and a == b)
        for a, b in zip(old, new, strict=True)
    )


def partition(tree: Any) -> tuple[list[jax.Array], Static]:
    """Splits ``tree`` into its arrays and the rest: structure, flags, names, functions.

    The array of a sharded parameter is this device's shard; its Variable is in the
    rest.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shard)
    shards = map(shard_of, leaves)
    arrays = [s.array if s else x for x, s in zip(leaves, shards, strict=True)]
    is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in arrays]
    rest = [None if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]
    found = map(jnp.asarray, itertools.compress(arrays, is_array))
    return list(found), Static((structure, rest, is_array))


def combine(arrays: Iterable[jax.Array], rest: Static) -> Any:
    """Reverses ``partition``, with these arrays."""
    values, (structure, leaves, is_array) = iter(arrays), rest.value
    leaves = [
        with_array(leaf, next(values)) if is_one else leaf
        for leaf, is_one in zip(leaves, is_array, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
