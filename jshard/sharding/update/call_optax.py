"""Calls an optimizer with trees that are like those of the user's own model.

Their arrays have exact shapes, and their variables none of the metadata that jshard
adds for a mesh, so that masks and labels may be trees of that model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from jshard.sharding.layout.padding import PADDING, exact, pad
from jshard.sharding.layout.specs import LOOKED_UP
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.precision import for_update
from jshard.system.errors import UserError

_OWN = (PADDING, LOOKED_UP)  # metadata that a mesh and a policy add


def first_state(tx: optax.GradientTransformation, params: Any, mesh: Any) -> Any:
    """Returns an optimizer's first state, padded like its parameters.

    Raises:
      UserError: its masks or labels are trees that do not fit the parameters.
    """
    with _trees_that_fit():
        state = tx.init(plain(exact(for_update(params), mesh)))
    return pad(_marked(state, params), mesh)


def next_updates(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    value: Any,
    mesh: Any,
) -> tuple[Any, Any]:
    """Returns an optimizer's updates and its next state, padded like parameters.

    It is called with ``value=``, the loss, if it and all that it combines take that.

    Raises:
      UserError: it needs arguments that a step does not have, or as ``first_state``.
    """
    args = plain(exact((grads, state, for_update(params)), mesh))
    with _trees_that_fit():
        results = call(tx, *args, value=value)
    return pad(_marked(results, params), mesh)


def call(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any, *, value: Any
) -> tuple[Any, Any]:
    """Calls an update, with ``value=`` if it takes that."""
    update, refused = optax.with_extra_args_support(tx).update, ""
    try:
        try:
            return update(grads, state, params, value=value)
        except TypeError as error:
            # Some say that they take more than gradients, and take something else
            # (optax.contrib.sam). They may be in what hands on whatever it is given.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            refused = f", and {error}"
        return update(grads, state, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise UserError(
            f"optimizer: {error}{refused}; a step has the gradients and value=, the "
            "loss, and no more: no line search, say"
        ) from error


def check_opt_state(tx: optax.GradientTransformation, state: Any, params: Any) -> None:
    """Raises UserError unless ``state`` is one that ``tx`` makes for ``params``."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    want = jax.eval_shape(functools.partial(first_state, tx, mesh=None), types)
    (want, expected), (got, found) = _by_path(want), _by_path(state)
    problem = "" if expected == found else "has fields of other types"
    for path in sorted(want.keys() | got.keys(), reverse=True):
        if path not in want:
            problem = f"has {path}, which the optimizer does not keep"
        elif path not in got:
            problem = f"has no {path}, which the optimizer keeps"
        elif want[path] != got[path]:
            problem = f"has {path} of shape {got[path]} in place of {want[path]}"
    if problem:
        raise UserError(
            f"the state was made with another optimizer: state.opt_state {problem}; "
            "give train_step the optimizer that fsdp.init was given"
        )


def _by_path(tree: Any) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Returns shapes by path, and the structure without variables' metadata."""
    value = lambda x: x.get_value() if is_variable(x) else x
    tree = jax.tree.map(value, tree, is_leaf=is_variable)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    keystr = jax.tree_util.keystr
    return {keystr(path): np.shape(leaf) for path, leaf in leaves}, structure


def plain(tree: Any) -> Any:
    """Returns variables with the metadata that they have in the user's model."""

    def one(variable: Any) -> Any:
        own = variable.get_metadata().keys() & _OWN if is_variable(variable) else ()
        if own:
            variable = variable.copy(variable.get_value())
            for key in own:
                variable.del_metadata(key)
        return variable

    return jax.tree.map(one, tree, is_leaf=is_variable)


def _marked(tree: Any, params: Any) -> Any:
    """Returns variables with the metadata of the parameters that they follow."""
    find = _by_end_of_path(params)

    def one(path: tuple, variable: Any) -> Any:
        param = find(path) if is_variable(variable) else None
        if param is None:
            return variable
        metadata = param.get_metadata()
        own = {key: metadata[key] for key in _OWN if key in metadata}
        return variable.copy(variable.get_value(), **own) if own else variable

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_variable)


def _by_end_of_path(params: Any) -> Callable[[tuple], Any]:
    """Returns what finds the parameter whose path a path ends with, or None."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)
    by_path = {tuple(map(str, path)): v for path, v in leaves if is_variable(v)}
    lengths = sorted({len(path) for path in by_path}, reverse=True)

    def find(path: tuple) -> Any:
        names = tuple(map(str, path))
        ends = (names[len(names) - n :] for n in lengths if n <= len(names))
        return next((by_path[end] for end in ends if end in by_path), None)

    return find


@contextlib.contextmanager
def _trees_that_fit() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "pytree structure error" not in str(error):
            raise
        where = " ".join(str(error).split("At that key path")[0].split())
        raise UserError(
            f"optimizer: it has a tree that is not like the model's parameters: "
            f"{where}; give masks and labels as a function of the parameters, or as a "
            "tree made from nnx.as_pure(nnx.state(model, nnx.Param))"
        ) from error
