"""Asks an optimizer whether a Stack's layers are tensors of their own to it.

A Stack keeps L tensors in one array, (L, ...). An optimizer must make of it what it
makes of these tensors in arrays of their own: the mask of all that has two dimensions
takes L biases for a matrix, and LAMB has one norm for L matrices. Values decide, those
of updates of a tiny model that has the parameters' paths and ranks.

In what form the tensors are apart depends on what the optimizer looks at, and one form
in which its updates are the same will do: all layers as in an ``nnx.List``; or one
layer of each Stack under its own path, for what chooses by exact paths; or, for what
has a norm of all gradients, too, a list of arrays in one variable. An optimizer that
treats equal layers unlike (a rate for each layer, or noise) knows of them, and is not
asked more.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.sharding.layout.layer_dims import IN_LAYER, layer_dims
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.call_optax import call, plain
from jshard.sharding.update.per_layer import asking
from jshard.sharding.update.stacks.known import Transformation, to_ask, unequal_mask
from jshard.system.errors import UserError

Form = Callable[[Any], Any]  # from a tree of Stacks to one of tensors

SIDE = 3  # at most, of the tiny arrays
# In float32. Weights are about 100, so that a decay of 1e-5 is five times as much.
SAME = 2e-4
# Of gradients, in turns: what clips must clip, and what was before must count.
SIZES = (1e-3, 1.0, 1.0, 1e3)
CALLS = 64  # at most, where updates are 0: warm-up, accumulation


def check_layers(tx: Transformation, params: nnx.State) -> None:
    """Raises UserError if ``tx`` takes the layers of a Stack for one tensor.

    Args:
      tx: any optax transformation.
      params: the parameters, abstract, of their exact shapes.
    """
    if not any(layer_dims(variable) for _, variable in nnx.to_flat_state(params)):
        return
    params, write = plain(params), "put it in jshard.optim.per_layer, which gives it "
    write += "one layer's tensors (clip by a global norm outside of it)"
    views = jax.tree.map(
        lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), params
    )
    if name := unequal_mask(tx, views, _one_layer):
        raise UserError(
            f"optimizer: its mask {name} chooses otherwise for a Stack's arrays, of "
            f"all layers, than for one layer's tensors; {write}, or let the mask look "
            "at paths"
        )
    with jax.ensure_compile_time_eval(), within(asking, True):
        for part in to_ask(tx):
            if problem := _not_apart(part, params):
                name = getattr(part.update, "__qualname__", repr(part.update))
                raise UserError(
                    f"optimizer: {name.split('.')[0]} in it does not treat a Stack's "
                    f"layers as tensors of their own: {problem}; {write}, or let what "
                    "it chooses by rank or size be chosen by path"
                )


def _not_apart(tx: Transformation, params: nnx.State) -> str | None:
    """Returns what is updated otherwise in a Stack than alone, or None."""
    whole, few = _tiny(params, None), _tiny(params, 2)
    problems = []
    for form, stacks in (
        (_as_a_list, few),
        (_one_layer, whole),
        (_lists_of_arrays, few),
    ):
        try:
            path = _updated_otherwise(tx, stacks, form)
            problem = f"its update of {path} is not that of each layer alone"
        except Exception as error:  # the user's: it may look for what a form has not
            path, problem = "", f"for a layer alone it raises {type(error).__name__}"
        if path is None or (not problems and _knows_layers(tx, whole)):
            return None
        problems.append(problem)
    return next((x for x in reversed(problems) if "raises" not in x), problems[-1])


def _updated_otherwise(tx: Transformation, stacks: Any, form: Form) -> str | None:
    """Returns the path of what updates of the two differ in, or None."""
    found = 0
    for whole, apart in zip(
        _updates(tx, stacks), _updates(tx, form(stacks)), strict=True
    ):
        # Both in one form: what is apart may have another order of leaves.
        named = jax.tree_util.tree_leaves_with_path(form(whole))
        want = jax.tree.leaves(apart)
        for (path, x), y in zip(named, want, strict=True):
            if not _same(x, y):
                names = [str(key.key) for key in path if hasattr(key, "key")]
                return ".".join(names)
        found += any(np.any(x) for x in want)
        if found == len(SIZES):
            break
    return None


def _knows_layers(tx: Transformation, stacks: Any) -> bool:
    """Returns whether layers of equal values are updated unlike each other.

    An optimizer that takes no arrays of these sizes cannot be asked; a warning says so.
    """

    def first(variable: Any, like: Any) -> Any:
        value = variable.get_value()[(slice(0, 1),) * layer_dims(like)]
        return variable.copy(np.broadcast_to(value, like.get_value().shape).copy())

    firsts = lambda tree: jax.tree.map(first, tree, stacks, is_leaf=is_variable)
    try:
        for updates in _updates(tx, firsts(stacks)):
            pairs = (jax.tree.leaves(x) for x in (updates, firsts(updates)))
            if not all(map(_same, *pairs)):
                return True
    except UserError:  # it says what no step has, whatever the arrays
        raise
    except Exception as error:  # the user's, raised again where a step has it, too
        warnings.warn(
            "optimizer: whether it treats a Stack's layers as tensors of their own is "
            f"not known: for tiny arrays it raises {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return True
    return False


def _updates(tx: Transformation, params: Any) -> Iterator[Any]:
    """Yields the updates of some calls, with gradients that differ in size."""
    state = _init(tx, params)
    for index in range(CALLS):
        size = SIZES[index % len(SIZES)]
        updates, state = _update(tx, params, state, float(index), size)
        yield jax.device_get(updates)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: Transformation, params: Any) -> Any:
    return tx.init(params)


@functools.partial(jax.jit, static_argnums=0)
def _update(tx: Transformation, params: Any, state: Any, index: Any, size: Any) -> Any:
    grads = jax.tree.map(lambda p: size * jnp.sin(0.07 * p + index), params)
    return call(tx, grads, state, params, value=1 / (1 + index))


def _same(x: Any, y: Any) -> bool:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = np.max(np.abs(y), initial=0, where=np.isfinite(y))
    equal = functools.partial(np.allclose, rtol=0, atol=SAME * size, equal_nan=True)
    return x.shape == y.shape and bool(equal(x, y))


# Tiny parameters, and their forms.


def _tiny(params: nnx.State, most: int | None) -> nnx.State:
    """Returns parameters of these paths and ranks, with ``most`` layers at most."""
    rng = np.random.default_rng(0)

    def one(variable: Any) -> Any:
        depth, shape = layer_dims(variable), variable.get_value().shape
        layers = tuple(min(n, most or n) for n in shape[:depth])
        sides = tuple(min(n, SIDE) for n in shape[depth:])
        # Layers of different norms.
        scale = 100 * rng.uniform(0.2, 2, (*layers, *[1] * len(sides)))
        value = scale * rng.uniform(-1, 1, (*layers, *sides))
        return variable.copy(value.astype(np.float32))

    return jax.tree.map(one, params, is_leaf=is_variable)


def _one_layer(tree: Any) -> Any:
    """The first layer of each Stack, as if it were in none."""

    def one(variable: Any) -> Any:
        if not is_variable(variable) or not (depth := layer_dims(variable)):
            return variable
        return _alone(variable.copy(variable.get_value()[(0,) * depth]))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def _alone(variable: Any) -> Any:
    """Returns a variable that is in no Stack."""
    if not is_variable(variable) or not layer_dims(variable):
        return variable
    variable = variable.copy(variable.get_value())
    variable.del_metadata(IN_LAYER)
    return variable


def _as_a_list(tree: nnx.State) -> nnx.State:
    """All layers, each under its index, which is before the path in a layer."""
    flat = {}
    for path, variable in nnx.to_flat_state(tree):
        value, paths = variable.get_value(), variable.get_metadata(IN_LAYER, ())
        for index in np.ndindex(value.shape[: len(paths)]):
            where, apart = list(path), _alone(variable.copy(value[index]))
            for i, in_layer in zip(index, paths, strict=True):
                where.insert(max(len(where) - len(in_layer), 0), i)
            flat[tuple(where)] = apart
    return nnx.from_flat_state(flat)


def _lists_of_arrays(tree: Any) -> Any:
    """All layers, in a list of arrays in place of each array."""

    def one(variable: Any) -> Any:
        if not is_variable(variable) or not (depth := layer_dims(variable)):
            return variable
        value = variable.get_value()
        return variable.copy([value[i] for i in np.ndindex(value.shape[:depth])])

    return jax.tree.map(one, tree, is_leaf=is_variable)
