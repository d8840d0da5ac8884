"""Finds a module's Variables and the objects reachable from it."""

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import own_dtype
from jshard.sharding.settings.state import TrainState


def is_variable(value: Any) -> bool:
    """Returns whether ``value`` is a Variable."""
    return isinstance(value, nnx.Variable)


def variables(module: nnx.Module) -> Iterator[tuple[tuple, nnx.Variable]]:
    """Iterates over every Variable of ``module``, once each, with its path."""
    return ((path, v) for path, v in nnx.iter_graph(module) if is_variable(v))


def array_name(path: tuple) -> str:
    """Returns the name of an array in checkpoints, from its path in a state."""
    return ".".join(array_keys(path))


def array_keys(path: tuple) -> tuple[str, ...]:
    """Returns the keys of a path in a state, without what only Flax puts there."""
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    # A Flax variable is a node with one leaf, its value. It is in a mapping; a field of
    # that name of an optimizer's state (a line search's) is in something else.
    in_mapping = isinstance([None, *path][-2], jax.tree_util.DictKey)
    return keys[:-1] if keys[-1] == "value" and in_mapping else keys


def set_attribute(module: nnx.Pytree, name: str, value: Any) -> None:
    """Sets an attribute, and tells Flax if it holds arrays.

    Flax takes traced arrays, lists and dicts for constants unless it is told.
    """
    arrays = any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))
    setattr(module, name, nnx.data(value) if arrays else value)


def expose_arrays(model: nnx.Module) -> None:
    """Tells Flax of all arrays that a new model holds outside of Variables."""
    for module in reachable(model):
        if isinstance(module, nnx.Module):
            for name, value in list(vars(module).items()):
                if not name.startswith("_pytree__") and not is_variable(value):
                    if not isinstance(value, nnx.Pytree):
                        set_attribute(module, name, value)


def reachable(start: Any, stop: Callable[[Any], bool] = lambda x: False) -> list[Any]:
    """Returns all objects reachable from ``start``, itself included.

    The search follows attributes of modules, whether or not these are pytrees, and the
    contents of containers. It does not enter Variables, or objects other than ``start``
    for which ``stop`` returns True, but the result includes these objects.
    """
    seen: dict[int, Any] = {}
    left = [start]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if not is_variable(x) and (x is start or not stop(x)):
            left += reversed(_children(x))
    return list(seen.values())


def opened(x: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]] | None:
    """Returns the children of a pytree, and what makes one of others; None: a leaf."""
    if type(x) is dict:  # JAX would sort it
        names = list(x)
        return [*x.values()], lambda values: dict(zip(names, values, strict=True))
    if isinstance(x, Iterator):  # JAX would warn
        return None
    children, node = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    is_leaf = len(children) == 1 and children[0] is x
    return None if is_leaf else (children, node.unflatten)


def tracers_behind(x: Any) -> Iterator[Tracer]:
    """Yields the traced arrays that an object holds where JAX does not look.

    These are in attributes of any object, in closures and in frames of generators.
    """
    seen: dict[int, Any] = {}
    left = [x]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (type, types.ModuleType)):
            continue
        seen[id(x)] = x
        if isinstance(x, Tracer):
            yield x
        elif not (isinstance(x, dict) and "__builtins__" in x):  # a function's globals
            left += filter(gc.is_tracked, gc.get_referents(x))


def of_class(module: nnx.Module, cls: type) -> Any:
    """Returns a module of another class that has the attributes of ``module``."""
    made = object.__new__(cls)
    vars(made).update(vars(module))
    return made


def replace(model: nnx.Module, others: Mapping[int, Any]) -> None:
    """Puts other objects in place of modules and Variables, in all that refers to them.

    ``others`` are by the ``id`` of the old ones. The model itself is not replaced.
    """
    for owner in [*reachable(model), *others.values()]:
        if not isinstance(owner, nnx.Pytree) or is_variable(owner):
            continue
        for name, value in list(vars(owner).items()):
            is_object = lambda x: isinstance(x, nnx.Pytree) or is_variable(x)
            leaves, tree = jax.tree.flatten(value, is_leaf=is_object)
            if any(id(x) in others for x in leaves):  # Flax's note of it stays
                new = [others.get(id(x), x) for x in leaves]
                vars(owner)[name] = jax.tree.unflatten(tree, new)


def _children(x: Any) -> list[Any]:
    if isinstance(x, nnx.Pytree):
        return [child for _, child in sorted(vars(x).items())]
    parts = opened(x)
    return [] if parts is None else parts[0]


def own_dtypes(state: TrainState, policy: Policy) -> dict[tuple, Any]:
    """Returns the dtypes of modules that have one of their own, by parameter.

    Only a policy that sets the dtype of the computation asks for them.
    """
    precisions = policy.everywhere("precision").values()
    if all(precision.compute is None for precision in precisions):
        return {}
    model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
    modules = {path: own_dtype(module) for path, module in nnx.iter_modules(model)}

    def innermost(path: tuple) -> Any:
        above = (path[:n] for n in reversed(range(len(path))))
        return next((modules[module] for module in above if module in modules), None)

    found = {path: innermost(path) for path, _ in variables(model)}
    return {path: dtype for path, dtype in found.items() if dtype is not None}
