"""JAX's own functions, made to call others.

JAX has no hook for the types of loops and branches (``jshard.unit.loop_types``). Its
functions are wrapped for tracebacks (``api_boundary``), and what the wrapper calls is a
cell that can be replaced: code that imported ``scan`` by its name, and ``fori_loop``,
meet the same function. Tried on JAX 0.10.2, 0.11.2 and 0.12.0.1; when it breaks, no
step can be traced.
"""

from collections.abc import Callable
from typing import Any

import jax


def inner(function: Callable) -> Callable:
    """What the wrapper of one of JAX's functions calls, as JAX made it."""
    return _checked(function).__wrapped__


def replace_inner(function: Callable, called: Callable) -> None:
    """Has the wrapper of one of JAX's functions call another one.

    Args:
      function: ``lax.scan``, ``jax.custom_vjp.__call__`` and the like.
      called: ``inner(function)`` to undo it.

    Raises:
      ImportError: this version of JAX wraps it in another way.
    """
    wrapper = _checked(function)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    cells["fun"].cell_contents = called


def with_rules(function: Any, **rules: Callable) -> Any:
    """A copy of a ``custom_vjp`` or ``custom_jvp`` function with other rules.

    Args:
      function: that has its rules in the attributes ``fwd`` and ``bwd``, or ``jvp``.
      **rules: by these names.
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
