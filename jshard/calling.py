"""A call of a module's method, with what it changed."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a Variable."""
    return isinstance(value, nnx.Variable)


def variables(module: nnx.Module) -> Iterator[tuple[tuple, nnx.Variable]]:
    """Every Variable of ``module``, once, with its path."""
    return ((path, v) for path, v in nnx.iter_graph(module) if is_variable(v))


def variables_in(tree: Any) -> list[nnx.Variable]:
    """Every Variable of a pytree's leaves."""
    return list(filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def call_method(method: Callable, module: nnx.Module, args: tuple, kwargs: dict) -> Any:
    """(result, what the call changed of the module's state, and of its arguments')."""
    passed = variables_in((args, kwargs))
    before = {path: variable.get_value() for path, variable in variables(module)}
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
