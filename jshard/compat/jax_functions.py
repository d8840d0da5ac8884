"""Replaces the implementations of JAX's own functions.

JAX has no hook for the types of loops and branches (``jshard.unit.loop_types``). Its
functions are wrapped by ``api_boundary``, which filters tracebacks, and the wrapper
holds the implementation in a closure cell. Replacing the contents of that cell also
reaches ``fori_loop`` and code that imported ``scan`` by name.

Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If it breaks, no step can be traced.
"""

from collections.abc import Callable
from typing import Any

import jax


def inner(function: Callable) -> Callable:
    """Returns the original implementation behind the wrapper of a JAX function."""
    return _checked(function).__wrapped__


def replace_inner(function: Callable, called: Callable) -> None:
    """Makes the wrapper of a JAX function call another implementation.

    Args:
      function: a JAX function such as ``lax.scan`` or ``jax.custom_vjp.__call__``.
      called: the new implementation; ``inner(function)`` restores the original.

    Raises:
      ImportError: if this version of JAX wraps the function differently.
    """
    wrapper = _checked(function)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    cells["fun"].cell_contents = called


def replace_bind(primitive: Any, bind: Callable | None) -> None:
    """Makes a primitive call another ``bind``; None restores its own."""
    if bind is not None:
        primitive.bind = bind
    else:
        del primitive.bind


def with_rules(function: Any, **rules: Callable) -> Any:
    """Returns a copy of a ``custom_vjp`` or ``custom_jvp`` function with other rules.

    Args:
      function: the function, with its rules in the attributes ``fwd`` and ``bwd``, or
        ``jvp``.
      **rules: the new rules, by attribute name.
    """
    alike = object.__new__(type(function))
    vars(alike).update(vars(function) | rules)
    return alike


def _checked(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or "fun" not in code.co_freevars:
        raise ImportError(
            f"jshard cannot type the loops of JAX {jax.__version__}: {function} is not "
            "wrapped as in 0.10.2 to 0.12; install one of these"
        )
    return function
