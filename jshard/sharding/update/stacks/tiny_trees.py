"""Tiny parameters for asking an optimizer, and what it makes of them.

They have the paths and ranks of a model's parameters, in float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jshard.sharding.layout.layer_dims import IN_LAYER, layer_dims
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.update.call_optax import call
from jshard.sharding.update.stacks.pointwise import pointwise_form
from jshard.system.compat.jaxprs import connections
from jshard.system.compat.xla_options import QUICK

Transformation: TypeAlias = optax.GradientTransformation
Form: TypeAlias = Callable[[Any], Any]  # from a tree of Stacks to one of tensors

SIDE = 3  # at most, of the tiny arrays
# In float32. Weights are about 100, so that a decay of 1e-5 is five times as much.
SAME = 2e-4
# Of gradients, in turns: what clips must clip, and what was before must count.
SIZES = (1e-3, 1.0, 1.0, 1e3)
CALLS = 64  # at most, where updates are 0: warm-up, accumulation


def tiny(params: nnx.State, most: int | None) -> nnx.State:
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


def calls(tx: Transformation, params: Any) -> Iterator[tuple[tuple, Any]]:
    """Yields the arguments and the results of some calls of an update.

    Arguments are gradients, which differ in size from call to call, state, parameters
    and the loss; results are updates and the next state. Ends after some updates that
    are not 0.
    """
    with jax.ensure_compile_time_eval():
        state, found = _init(tx, params), 0
    for index in range(CALLS):
        wave = lambda p, i=index: SIZES[i % len(SIZES)] * np.sin(0.07 * p + i)
        grads = jax.tree.map(lambda p, w=wave: w(p).astype(p.dtype), params)
        args = grads, state, params, 1 / (1 + index)
        updates, state = updated(tx, *args)
        updates = jax.device_get(updates)
        yield args, (updates, state)
        found += any(np.any(x) for x in jax.tree.leaves(updates))
        if found == len(SIZES):
            return


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _init(tx: Transformation, params: Any) -> Any:
    return tx.init(params)


def updated(tx: Transformation, grads: Any, state: Any, params: Any, value: Any) -> Any:
    """Returns updates and the next state, while something else may be traced."""
    with jax.ensure_compile_time_eval():
        return _updated(tx, grads, state, params, value)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _updated(tx: Any, grads: Any, state: Any, params: Any, value: Any) -> Any:
    return call(tx, grads, state, params, value=value)


def traced(tx: Transformation, params: Any) -> tuple[Any, tuple, tuple]:
    """Returns the jaxpr of an update, and trees of its inputs and outputs.

    ``params`` are arrays, or abstract and of any size. Inputs are gradients, state,
    parameters and the loss, and outputs are updates and state.
    """
    abstract = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.float32)
    params = jax.tree.map(abstract, params)
    # Not ``tx.init`` itself, whose shapes JAX remembers from when nobody asked.
    state = jax.eval_shape(lambda params: tx.init(params), params)
    inputs = params, state, params, abstract(0)
    jaxpr, outputs = jax.make_jaxpr(
        lambda grads, state, params, value: call(tx, grads, state, params, value=value),
        return_shape=True,
    )(*inputs)
    return jaxpr, inputs, outputs


def programs(tx: Transformation, params: Any) -> tuple[Any, Any]:
    """Returns the forms of a first state and of an update; None if not pointwise."""
    abstract = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.float32)
    params = jax.tree.map(abstract, params)
    number = len(jax.tree.leaves(params))
    first = jax.make_jaxpr(lambda params: tx.init(params))(params)
    form = pointwise_form(first, range(number))
    if form is None:
        return None, None
    jaxpr, (_, state, *_), _ = traced(tx, params)
    of_state = [None] * len(jax.tree.leaves(state))
    return form, pointwise_form(
        jaxpr, [*range(number), *of_state, *range(number), None]
    )


def choices(tx: Transformation, params: Any) -> Any:
    """Returns the program of an update without the numbers in it.

    What a mask or a label chooses is in it.
    """
    return connections(traced(tx, params)[0].jaxpr)


def same(x: Any, y: Any) -> bool:
    """Returns whether two arrays are equal, but for rounding."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = np.max(np.abs(y), initial=0, where=np.isfinite(y))
    equal = functools.partial(np.allclose, rtol=0, atol=SAME * size, equal_nan=True)
    return x.shape == y.shape and bool(equal(x, y))


# Forms in which the layers of Stacks are tensors of their own.


def one_layer(tree: Any) -> Any:
    """The first layer of each Stack, as if it were in none."""

    def one(variable: Any) -> Any:
        if not is_variable(variable) or not (depth := layer_dims(variable)):
            return variable
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            value = jax.ShapeDtypeStruct(value.shape[depth:], value.dtype)
        else:
            value = value[(0,) * depth]
        return _alone(variable.copy(value))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def _alone(variable: Any) -> Any:
    """Returns a variable that is in no Stack."""
    if not is_variable(variable) or not layer_dims(variable):
        return variable
    variable = variable.copy(variable.get_value())
    variable.del_metadata(IN_LAYER)
    return variable


def as_a_list(tree: nnx.State) -> nnx.State:
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


def lists_of_arrays(tree: Any) -> Any:
    """All layers, in a list of arrays in place of each array."""

    def one(variable: Any) -> Any:
        if not is_variable(variable) or not (depth := layer_dims(variable)):
            return variable
        value = variable.get_value()
        return variable.copy([value[i] for i in np.ndindex(value.shape[:depth])])

    return jax.tree.map(one, tree, is_leaf=is_variable)
