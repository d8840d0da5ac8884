"""Calls a module's method as a function: what it changes leaves as a result.

The call is passed copies, in which what the caller has twice is one object, too. What
it changes in a copy is changed in the original, and where it returns a copy, or a part
of its module, the caller gets the original.
"""

import gc
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.sharding.collectives.shards import is_shard
from jshard.sharding.float8.products import Float8
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.layout.variables import (
    is_variable,
    opened,
    reachable,
    set_attribute,
    tracers_behind,
)
from jshard.sharding.units.partition import combine_all
from jshard.system.compat.flax_modules import is_pytree
from jshard.system.compat.jaxprs import Static
from jshard.system.errors import UserError

Path = tuple[str, ...]

# (path of a module, name of an attribute) -> its new value
Changes = dict[tuple[Path, str], Any]

# What the caller has, too: its place in the arguments, or the path of a unit's part.
Key = int | Path

# By the names of attributes or items, what tells whether they have changed.
Content = dict[Any, list[Any]]

_ABSENT = object()  # the value of an attribute that was deleted


def call_method(
    method: Callable,
    module: nnx.Module,
    first: tuple,
    inputs: Iterable[jax.Array],
    arguments: Static,
) -> tuple[Any, Changes, dict[int, Any], dict[int, Key]]:
    """Calls ``method(module, *first, *args, **kwargs)`` and collects what it changed.

    ``inputs`` and ``arguments`` are ``partition((args, kwargs))``, maybe with paths in
    place of parts of the module.

    Returns:
      The result; the attributes of the module and its submodules that were set, created
      or deleted, or whose Variable has another value; the new contents of objects in
      the arguments, by their place; and the keys of all copies, by their ``id``.

    Raises:
      UserError: the call returns, or changes, what JAX cannot return from a traced
        function.
    """
    own_containers(module)
    parts = parts_of(module)
    passed = combine_all(inputs, arguments, parts)
    args, kwargs = passed[-1]
    lists = [x for x in (*parts.values(), *passed) if isinstance(x, (list, dict))]
    copies = {id(x): (x, x) for x in lists}
    for x in passed:
        if isinstance(x, nnx.Pytree) and not is_variable(x):
            own_containers(x, copies)
    before = {path: (m, _content(m) or {}) for path, m in _modules(module)}
    passed_before = [_content(x) for x in passed]
    keys: dict[int, Key]
    keys = {id(x): i for i, x in enumerate(passed) if passed_before[i] is not None}
    keys |= {id(x): path for path, x in parts.items()}
    opaque = _opaque(before, passed[-1])
    known = {id(array) for _, x in opaque for array in tracers_behind(x)}

    def argument(x: Any) -> str:
        return argument_name(method, (*first, *args), kwargs, x)

    def check(value: Any, does: str) -> None:
        for x in _objects(value):
            new = any(id(array) not in known for array in tracers_behind(x))
            if new or isinstance(x, types.GeneratorType):
                raise UserError(
                    f"{name_of(method, module)} {does} a {type(x).__name__}, which is "
                    "not a pytree, so that its arrays cannot leave a jshard unit; take "
                    "a tuple, a list, a dict or a class that is registered "
                    "(jax.tree_util.register_dataclass)"
                )

    result = method(module, *first, *args, **kwargs)
    for path, x in opaque:
        check(x, f"puts arrays into {_attribute(path) if path else argument(x)},")
    check(result, "returns")
    changes = _changes(before)
    for (path, name), value in changes.items():
        check(value, f"puts into {_attribute((*path, name))}")
    changed: dict[int, Any] = {}
    for i, (x, old) in enumerate(zip(passed, passed_before, strict=True)):
        if names := _changed(old, _content(x)):
            changed[i] = _new_content(x, names)
            check(changed[i], f"puts into {argument(x)}")
            if changed[i] is None:
                raise UserError(
                    f"{name_of(method, module)} changes {argument(x)}, a "
                    f"{type(x).__name__}; a jshard unit gives back what is changed in "
                    "lists, dicts and attributes, so return the new one"
                )
    return result, changes, changed, keys


def _changes(before: dict[Path, tuple[nnx.Module, Content]]) -> Changes:
    """Returns what has changed in a call since ``before``: modules and contents."""
    changes: Changes = {}
    for path, (own, old) in before.items():
        for name in _changed(old, _content(own)):
            value = vars(own).get(name, _ABSENT)
            if is_variable(value) and isinstance(value.get_raw_value(), Float8):
                continue  # a transform of Flax sets all that it was given
            for x in reachable(value):
                if isinstance(x, nnx.Module) and not is_pytree(type(x)):
                    raise UserError(
                        f"{type(own).__name__}.{name} is set, within a jshard unit, to "
                        f"a {type(x).__name__}, which is not a pytree, so its arrays "
                        "cannot leave the unit; make it where the model is made"
                    )
            changes[path, name] = value
    return changes


def _opaque(
    modules: dict[Path, tuple[nnx.Module, Content]], arguments: Any
) -> list[tuple[Path, Any]]:
    """Returns what arguments and modules hold that is no pytree, with its path.

    The path of what is in the arguments is empty.
    """
    found: list[Any] = [((), x) for x in _objects(arguments)]
    for path, (own, attributes) in modules.items():
        for name in attributes:
            value = vars(own)[name]
            if not isinstance(value, nnx.Pytree):  # others have a path of their own
                found += [((*path, name), x) for x in _objects(value)]
    return found


def _objects(value: Any) -> list[Any]:
    """Returns what a value holds that is no pytree and may hold arrays."""
    others = jax.Array, np.ndarray, nnx.Variable, nnx.Pytree, type
    return [
        x
        for x in reachable(value)
        if gc.is_tracked(x) and not isinstance(x, others) and opened(x) is None
    ]


def _attribute(path: Path) -> str:
    return f"its attribute {'.'.join(path)!r}"


def parts_of(unit: nnx.Module) -> dict[Key, Any]:
    """Returns a unit's modules, and what these hold but for parameters, by path."""
    parts: dict[Key, Any] = {}
    for path, own in _modules(unit):
        parts[path] = own
        for name, value in vars(own).items():
            held = is_variable(value) and not is_shard(value)
            if held or isinstance(value, (list, dict)):
                parts[*path, name] = value
    return parts


def argument_name(method: Callable, args: tuple, kwargs: dict, x: Any) -> str:
    """Returns the argument of a method that holds ``x``, as "its argument 'cache'"."""
    names = list(inspect.signature(method).parameters)[1:]
    named = [(names[min(i, len(names) - 1)], value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        if any(y is x for y in reachable(value)):
            return f"its argument {name!r}"
    return "an argument"


def name_of(method: Callable, module: nnx.Module) -> str:
    """Returns how a user calls a method, as "Block" or "Block.encode"."""
    name, method_name = type(module).__name__, method.__name__
    return name if method_name == "__call__" else f"{name}.{method_name}"


def own_containers(
    module: nnx.Pytree, copies: dict[int, tuple[Any, Any]] | None = None
) -> None:
    """Copies the lists, dicts and sets that a merged module shares with its structure.

    What a call appends to them would otherwise be there in the next trace, too. What
    two modules hold is one copy: ``copies`` has (original, copy) by the ``id`` of both.
    """
    copies = {} if copies is None else copies
    for _, own in _modules(module):
        for name, value in vars(own).items():
            if isinstance(value, (list, dict, set)):
                vars(own)[name] = _copy(value, copies)


def _copy(x: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    if id(x) in copies:
        return copies[id(x)][1]
    if isinstance(x, set):
        new = set(x)
    elif not isinstance(x, (list, dict, tuple)) or (parts := opened(x)) is None:
        return x
    else:
        children, build = parts
        new = build([_copy(child, copies) for child in children])
    copies[id(x)] = copies[id(new)] = x, new
    return new


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
        elif type(old) is type(value) and isinstance(old, (list, dict)):
            set_content(old, value)  # another module may hold it, too
            set_attribute(owner, name, old)
        else:
            if is_variable(value) and layers:
                mark_layers(value, outer=[(*path, name)])
            set_attribute(owner, name, value)


def set_content(original: Any, content: Any) -> None:
    """Gives an argument the new content that ``call_method`` returned, in place."""
    if isinstance(original, list):
        original[:] = content
    elif isinstance(original, dict):
        original.clear()
        original.update(content)
    elif is_variable(original):
        original.set_raw_value(content)
    else:
        for name, value in content.items():
            if value is _ABSENT:
                delattr(original, name)
            elif isinstance(original, nnx.Pytree):
                set_attribute(original, name, value)
            else:
                setattr(original, name, value)


def _new_content(x: Any, names: list[Any]) -> Any:
    """Returns what ``set_content`` takes, or None for what it does not change."""
    if isinstance(x, list):
        return list(x)
    if isinstance(x, dict):
        return dict(x)
    if is_variable(x):
        return x.get_raw_value()
    attributes = [name for name in names if isinstance(name, str)]
    own = {name: vars(x).get(name, _ABSENT) for name in attributes}
    return own or None


def _content(x: Any) -> Content | None:
    """Returns what tells whether an object has changed, or None if it cannot change."""
    if is_variable(x):
        return {"": [x.get_raw_value()]}
    if isinstance(x, nnx.Pytree):
        of_flax = "_pytree__", "_object__"
        own = vars(x).items()
        return {name: _parts(y) for name, y in own if not name.startswith(of_flax)}
    if isinstance(x, list):
        return {i: [value] for i, value in enumerate(x)}
    if isinstance(x, dict):
        return {key: [value] for key, value in x.items()}
    if x is None or isinstance(x, tuple) or (parts := opened(x)) is None:
        return None
    (children, _), (again, _) = parts, opened(x) or parts
    if not _same(children, again):  # made anew each time
        children = []
    own = {name: [value] for name, value in getattr(x, "__dict__", {}).items()}
    return {**own, **{i: [child] for i, child in enumerate(children)}}


def _changed(old: Content | None, new: Content | None) -> list[Any]:
    """Returns the names under which two contents differ."""
    old, new = old or {}, new or {}
    names = dict.fromkeys((*old, *new))
    return [name for name in names if not _same(old.get(name, []), new.get(name, []))]


def _modules(
    module: Any, path: Path = (), seen: frozenset[int] = frozenset()
) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields ``module`` and all modules within it, with their paths."""
    yield path, module
    seen |= {id(module)}
    for name, value in vars(module).items():
        inside = isinstance(value, nnx.Pytree) and not is_variable(value)
        if inside and id(value) not in seen:
            yield from _modules(value, (*path, name), seen)


def _parts(value: Any) -> list[Any]:
    """Returns the structures in a value, to be compared, and its objects."""
    is_leaf = lambda x: not isinstance(x, (list, dict, tuple))
    leaves, structure = jax.tree.flatten(value, is_leaf=is_leaf)
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
