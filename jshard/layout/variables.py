"""A module's Variables, and what can be reached from it."""

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


def reachable(start: Any, stop: Callable[[Any], bool]) -> list[Any]:
    """What can be reached from ``start`` without entering what ``stop`` is true of.

    Through attributes of modules, pytrees or not, and through containers. The start is
    entered in any case; Variables are not.
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


def _children(x: Any) -> list[Any]:
    if isinstance(x, nnx.Pytree):
        return [child for _, child in sorted(vars(x).items())]
    return jax.tree.leaves(x, is_leaf=lambda y: y is not x)
