"""Loops and branches of model code whose values come to differ by device.

In ``shard_map`` a value's type says over which mesh axes it varies, and JAX wants a
loop's carry, or what all branches of a ``cond`` return, to be of one type. So
``lax.scan(f, jnp.zeros(n), xs)`` is an error there: it starts from a constant, the same
on every device, and goes on with what depends on the batch. While jshard traces a step,
such a carry enters as varying (``lax.pcast``), and the loop is traced again; what stays
the same on every device keeps its type. The transpose of the cast is a sum over
devices, so gradients stay exact.

The rules of custom derivatives may give constants too, and differentiate constants.

The other way around JAX is silent: what a branch or a loop returns differs by device
where its predicate does, though each branch's value is a constant. It is typed so here.

JAX has no hook for this: what its functions call is replaced while a step is traced
(``jshard.compat.jax_functions``).
"""

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jshard.comm.varying import is_float, vary, varying
from jshard.compat.jax_functions import inner, replace_inner, with_rules
from jshard.mesh import manual_axes

# The mesh axes over which a value varies.
Axes = frozenset[str]


@contextlib.contextmanager
def typed_loops() -> Iterator[None]:
    """Types the loops and branches of what is traced inside, in this thread."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            for function, typed in _TYPED.items():
                replace_inner(function, typed)
    token = _typing.set(True)
    try:
        yield
    finally:
        _typing.reset(token)
        with _lock:
            _inside -= 1
            if _inside == 0:
                for function in _TYPED:
                    replace_inner(function, inner(function))


class _VariesMore(Exception):
    """What comes out of a loop or branch varies over more axes than its type says."""

    def __init__(self, axes: list[Axes]):
        super().__init__()
        self.axes = axes


def _axes(x: Any) -> Axes:
    return varying(x) if isinstance(x, jax.Array) else frozenset()


def _tree_axes(tree: Any) -> list[Axes]:
    return list(map(_axes, jax.tree.leaves(tree)))


def _vary(x: Any, axes: Axes) -> Any:
    ordered = tuple(axis for axis in manual_axes() if axis in axes)
    return vary(x, ordered) if axes - _axes(x) else x


def _typed(tree: Any, want: Sequence[Axes]) -> Any:
    """``tree`` with the types ``want``.

    Raises:
      _VariesMore: a leaf varies over more axes.
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(want):
        return tree  # JAX says what is wrong with it
    need = [w | _axes(x) for x, w in zip(leaves, want, strict=True)]
    if need != list(want):
        raise _VariesMore(need)
    return structure.unflatten(map(_vary, leaves, want))


def _settled(loop: Callable[[Any], Any], init: Any) -> Any:
    """``loop(init)``, with ``init`` made to vary until it is of the carry's type."""
    leaves, structure = jax.tree.flatten(init)
    while True:
        try:
            return loop(structure.unflatten(leaves))
        except _VariesMore as error:
            leaves = list(map(_vary, leaves, error.axes))


def _scan(scan: Callable, f: Callable, init: Any, *args: Any, **kwargs: Any) -> Any:
    @functools.wraps(f)
    def body(carry: Any, x: Any) -> Any:
        want = _tree_axes(carry)  # before f, which may empty it (nnx.scan does)
        result = f(carry, x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            return result  # JAX says what is wrong with it
        after, y = result
        return _typed(after, want), y

    return _settled(lambda init: scan(body, init, *args, **kwargs), init)


def _while_loop(
    while_loop: Callable, cond_fun: Callable, body_fun: Callable, init_val: Any
) -> Any:
    @functools.wraps(cond_fun)
    def goes_on(carry: Any) -> Any:
        have = _tree_axes(carry)
        predicate = cond_fun(carry)
        need = [axes | _axes(predicate) for axes in have]
        if need != have:
            raise _VariesMore(need)
        return predicate

    @functools.wraps(body_fun)
    def body(carry: Any) -> Any:
        want = _tree_axes(carry)
        return _typed(body_fun(carry), want)

    return _settled(lambda init: while_loop(goes_on, body, init), init_val)


def _cond(
    cond: Callable,
    pred: Any,
    true_fun: Callable,
    false_fun: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (callable(true_fun) and callable(false_fun)):
        return cond(pred, true_fun, false_fun, *args, **kwargs)
    run = lambda branches: cond(pred, *branches, *args, **kwargs)
    return _of_one_type(run, pred, [true_fun, false_fun])


def _switch(
    switch: Callable,
    index: Any,
    branches: Sequence[Callable],
    *args: Any,
    **kwargs: Any,
) -> Any:
    run = lambda branches: switch(index, branches, *args, **kwargs)
    return _of_one_type(run, index, branches)


def _of_one_type(
    run: Callable[[list[Callable]], Any], index: Any, branches: Sequence[Callable]
) -> Any:
    """``run(branches)``, each of which returns what varies where any of them does."""
    want: list[Axes] | None = None

    def typed(branch: Callable) -> Callable:
        @functools.wraps(branch)
        def call(*args: Any) -> Any:
            nonlocal want
            result = branch(*args)
            if want is None:
                want = [axes | _axes(index) for axes in _tree_axes(result)]
            return _typed(result, want)

        return call

    while True:
        try:
            return run(list(map(typed, branches)))
        except _VariesMore as error:
            want = error.axes


def _custom_vjp(
    custom_vjp: Callable, function: jax.custom_vjp, *args: Any, **kwargs: Any
) -> Any:
    if _module(function.fun).split(".")[0] == "jshard":
        return custom_vjp(function, *args, **kwargs)  # it says itself what varies
    axes = frozenset[str]().union(*_tree_axes((args, kwargs)))

    def typed(tree: Any) -> Any:
        return jax.tree.map(lambda x: _vary(x, axes) if _moves(x) else x, tree)

    names = list(inspect.signature(function.fun).parameters)
    static = [name for i, name in enumerate(names) if i in function.nondiff_argnums]
    args = tuple(
        x if n in function.nondiff_argnums else typed(x) for n, x in enumerate(args)
    )
    kwargs = {name: x if name in static else typed(x) for name, x in kwargs.items()}
    bwd: Any = function.bwd
    alike = with_rules(function, bwd=lambda *residuals: typed(bwd(*residuals)))
    return custom_vjp(alike, *args, **kwargs)


def _custom_jvp(
    custom_jvp: Callable, function: jax.custom_jvp, *args: Any, **kwargs: Any
) -> Any:
    def jvp(*inputs: Any) -> Any:
        out, tangents = rule(*inputs)
        if jax.tree.structure(out) != jax.tree.structure(tangents):
            return out, tangents  # JAX says what is wrong with it
        like = lambda x, t: _vary(t, _axes(x)) if _moves(t) else t
        return out, jax.tree.map(like, out, tangents)

    rule: Any = function.jvp
    alike = with_rules(function, jvp=jvp) if rule else function
    return custom_jvp(alike, *args, **kwargs)


def _module(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def _moves(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, float)) and is_float(jnp.asarray(x))


def _while_tracing_steps(typed: Callable, function: Callable) -> Callable:
    """JAX's ``function``, in ``shard_map`` of a step replaced by ``typed``."""
    original = inner(function)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _typing.get() and manual_axes():
            return typed(original, *args, **kwargs)
        return original(*args, **kwargs)

    return call


_TYPED = {
    function: _while_tracing_steps(typed, function)
    for function, typed in {
        lax.scan: _scan,
        lax.while_loop: _while_loop,
        lax.cond: _cond,
        lax.switch: _switch,
        jax.custom_vjp.__call__: _custom_vjp,
        jax.custom_jvp.__call__: _custom_jvp,
    }.items()
}
_typing = contextvars.ContextVar("typing", default=False)
_lock = threading.Lock()
_inside = 0
