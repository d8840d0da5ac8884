"""A call of a module's method, with what it changed."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jshard.shards import is_shard


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a Variable."""
    return isinstance(value, nnx.Variable)


def variables(module: nnx.Module) -> Iterator[tuple[tuple, nnx.Variable]]:
    """Every Variable of ``module``, once, with its path."""
    return ((path, v) for path, v in nnx.iter_graph(module) if is_variable(v))


def reachable(start: Any, stop: Callable[[Any], bool]) -> list[Any]:
    """What can be reached from ``start`` without entering what ``stop`` is true of.

    Through attributes of modules, pytrees or not, and through containers. The start is
    entered in any case; Variables are not.
    """
    seen: dict[int, Any] = {}

    def visit(x: Any) -> None:
        if id(x) in seen:
            return
        seen[id(x)] = x
        if is_variable(x) or (x is not start and stop(x)):
            return
        for child in _children(x):
            visit(child)

    visit(start)
    return list(seen.values())


def _children(x: Any) -> list[Any]:
    if isinstance(x, nnx.Pytree):
        return [child for _, child in sorted(vars(x).items())]
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)


def variables_in(tree: Any) -> list[nnx.Variable]:
    """Every Variable in a pytree and the modules in it, but for sharded parameters."""
    found = filter(is_variable, reachable(tree, stop=lambda x: False))
    return [variable for variable in found if not is_shard(variable)]


def call_method(method: Callable, module: nnx.Module, args: tuple, kwargs: dict) -> Any:
    """(result, what the call changed of the module's state, and of its arguments')."""
    passed = variables_in((args, kwargs))
    before = {
        path: variable.get_value()
        for path, variable in variables(module)
        if not is_shard(variable)
    }
    passed_before = [variable.get_value() for variable in passed]
    result = method(module, *args, **kwargs)
    state = [
        (path, variable)
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
        if path in before and variable.get_value() is not before[path]
    ]
    changed = {
        i: variable.get_value()
        for i, variable in enumerate(passed)
        if variable.get_value() is not passed_before[i]
    }
    return result, nnx.from_flat_state(state), changed
