"""A call of a module's method, with what it changed."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jshard.layout.variables import is_variable, reachable, variables
from jshard.unit.shards import is_shard


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
