"""Types loops and branches in model code whose values become varying.

In ``shard_map``, a value's type says over which mesh axes it varies. JAX requires one
type for the carry of a loop in all iterations, and for the results of all branches of a
``cond``. Therefore ``lax.scan(f, jnp.zeros(n), xs)`` is an error there: the carry
starts as a constant, which is the same on every device, and then depends on the batch.
While jshard traces a step, it casts such a carry to varying (``lax.pcast``) and traces
the loop again. Values that are the same on every device keep their type. The transpose
of the cast is a sum over devices, so gradients stay exact.

The rules of custom derivatives get the same treatment: they may return constants, and
may differentiate constants.

JAX misses the opposite case: the result of a branch or a loop varies where its
predicate varies, even if each branch returns a constant. Here it is typed as varying.

JAX has no hook for this, so the inner functions of its API are replaced while a step is
traced (``jshard.compat.jax_functions``).
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
from jshard.compat.jax_functions import (
    inner,
    replace_bind,
    replace_inner,
    with_rules,
)
from jshard.mesh import manual_axes

Axes = frozenset[str]  # the mesh axes over which a value varies


@contextlib.contextmanager
def typed_loops() -> Iterator[None]:
    """Types the loops and branches that this thread traces inside the context."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            for function, typed in _TYPED.items():
                replace_inner(function, typed)
            for primitive in _POLYNOMIALS:
                replace_bind(primitive, _polynomial(primitive.bind))
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
                for primitive in _POLYNOMIALS:
                    replace_bind(primitive, None)


class _VariesMore(Exception):
    """A value that leaves a loop or branch varies over more axes than expected."""

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
    """Casts the leaves of ``tree`` to vary over the axes ``want``.

    Raises:
      _VariesMore: a leaf varies over more axes.
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(want):
        return tree  # JAX raises the error
    need = [w | _axes(x) for x, w in zip(leaves, want, strict=True)]
    if need != list(want):
        raise _VariesMore(need)
    return structure.unflatten(map(_vary, leaves, want))


def _settled(loop: Callable[[Any], Any], init: Any) -> Any:
    """Returns ``loop(init)``, with ``init`` cast until it has the carry's type."""
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
            return result  # JAX raises the error
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
    """Returns ``run(branches)``, with the results of all branches cast to one type."""
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
    module = getattr(function.fun, "__module__", None) or ""
    if module.split(".")[0] == "jshard":
        return custom_vjp(function, *args, **kwargs)  # jshard's own rules are typed
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
            return out, tangents  # JAX raises the error
        like = lambda x, t: _vary(t, _axes(x)) if _moves(t) else t
        return out, jax.tree.map(like, out, tangents)

    rule: Any = function.jvp
    alike = with_rules(function, jvp=jvp) if rule else function
    return custom_jvp(alike, *args, **kwargs)


def _polynomial(bind: Callable) -> Callable:
    """Returns ``bind`` with coefficients that vary as the argument does.

    JAX 0.12 has a polynomial in the derivative of ``erf``, so of the exact GELU,
    and forgets this cast (docs/log.md).
    """

    def typed(*operands: Any, **params: Any) -> Any:
        arrays = list(map(jnp.asarray, operands))
        axes = frozenset[str]().union(*map(_axes, arrays))
        return bind(*(_vary(x, axes) for x in arrays), **params)

    return typed


def _moves(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, float)) and is_float(jnp.asarray(x))


def _while_tracing_steps(typed: Callable, function: Callable) -> Callable:
    """Returns JAX's ``function``, replaced by ``typed`` in a step's ``shard_map``."""
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
# Since JAX 0.12.
_POLYNOMIALS: list[Any] = list(filter(None, [getattr(lax, "polynomial_p", None)]))
_typing = contextvars.ContextVar("typing", default=False)
_lock = threading.Lock()
_inside = 0
