"""Optimizers on stacked layers: one layer's tensors at a time.

The optimizer runs on global arrays, so optax transformations are exact as they are.
But a Stack's leaf holds L tensors, and an optimizer that looks at whole tensors (their
norms, their rank, their factors) must see each of them: ``per_layer``.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard.layout.layers import layer_dims, stack_of, without_layers
from jshard.optim.whole_layers import map_layers
from jshard.policy import Policy

_sharding = contextvars.ContextVar[tuple[Mesh, Policy] | None]("sharding", default=None)


@contextlib.contextmanager
def sharded_update(mesh: Mesh | None, policy: Policy) -> Iterator[None]:
    """Tells per_layer, while an update is traced, how parameters are sharded."""
    token = _sharding.set(mesh and (mesh, policy))
    try:
        yield
    finally:
        _sharding.reset(token)


_layers = contextvars.ContextVar[tuple[Any, ...]]("layers", default=())


@contextlib.contextmanager
def at_layer(index: Any) -> Iterator[None]:
    """Tells what is traced inside that it updates one layer of a Stack, and which."""
    token = _layers.set((*_layers.get(), index))
    try:
        yield
    finally:
        _layers.reset(token)


def layers_here() -> tuple[Any, ...]:
    """The index of the layer that is being updated, in each Stack around it."""
    return _layers.get()


class PerLayerState(NamedTuple):
    """State of ``per_layer``.

    Attributes:
      rest: the inner optimizer's state for parameters outside Stacks.
      stacked: for each Stack, by its path in the model, the inner state of one layer
        with a leading (L,) on every leaf.
    """

    rest: Any
    stacked: dict[str, Any]


def per_layer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Applies ``tx`` to every layer of a Stack separately, and to the rest as it is.

    For optimizers that treat a leaf as one tensor (LAMB, LARS, Adafactor, adaptive
    clipping) or look at its rank (Muon, ``ndim >= 2`` masks). What spans the whole
    model stays outside: ``optax.chain(optax.clip_by_global_norm(1.0),
    jshard.per_layer(muon(1e-3)))``.

    Layers are mapped at once where the update is elementwise but for reductions.
    Where it multiplies matrices (of Stacks), each device is handed whole ones by an
    all-to-all and hands the shards of the result back: no matrix is gathered, no work
    is done twice, and few full matrices are in memory.

    Every Stack has a state of its own: what looks across the parameters it is given
    (``optax.clip_by_global_norm``, say) sees those of one layer of one Stack.

    Args:
      tx: any optax transformation, for parameters from ``nnx`` Stacks.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> PerLayerState:
        stacked = {
            name: jax.vmap(inner.init)(_lower(_of_stack(params, name)))
            for name, inner in _stacks(params, tx)
        }
        return PerLayerState(tx.init(_of_stack(params, None)), stacked)

    def update(updates: Any, state: PerLayerState, params: Any = None, **extra: Any):
        of = lambda name: (_of_stack(updates, name), _of_stack(params, name))
        grads, values = of(None)
        merged, rest = tx.update(grads, state.rest, values, **extra)
        stacked = {}
        for name, inner in _stacks(updates, tx):
            grads, values = map(_lower, of(name))
            new, stacked[name] = _update_layers(
                _with_extra(inner, extra), grads, state.stacked[name], values
            )
            merged = _merge(merged, new, name, updates)
        return merged, PerLayerState(rest, stacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_extra(tx: optax.GradientTransformationExtraArgs, extra: dict) -> Callable:
    return lambda updates, state, params: tx.update(updates, state, params, **extra)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _stack(path: tuple, variable: Any) -> str | None:
    """The name of the Stack that holds a variable; None outside, or masked."""
    if not _is_variable(variable) or not jax.tree.leaves(variable):
        return None
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    stack = stack_of(tuple(names), variable)
    return None if stack is None else ".".join(stack) or "model"


def _of_stack(tree: Any, name: str | None) -> Any:
    """``tree`` with MaskedNodes, as optax masks, for what is of other Stacks."""

    def pick(path: tuple, variable: Any) -> Any:
        if not _is_variable(variable) or _stack(path, variable) == name:
            return variable
        return variable.copy(optax.MaskedNode())

    return jax.tree_util.tree_map_with_path(pick, tree, is_leaf=_is_variable)


def _stacks(tree: Any, tx: optax.GradientTransformationExtraArgs) -> Iterator[tuple]:
    """(name, the transformation of one layer) of each Stack with variables there."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    named = [(_stack(path, leaf), leaf) for path, leaf in leaves]
    for name in sorted({name for name, _ in named if name is not None}):
        nested = any(layer_dims(leaf) > 1 for stack, leaf in named if stack == name)
        yield name, per_layer(tx) if nested else tx


def _lower(tree: Any) -> Any:
    """Marks variables as having one layer dimension less, for use under a map."""

    def lower(variable: Any) -> Any:
        stacked = _is_variable(variable) and layer_dims(variable)
        return without_layers(variable) if stacked else variable

    return jax.tree.map(lower, tree, is_leaf=_is_variable)


def _merge(into: Any, new: Any, name: str, like: Any) -> Any:
    """Puts the variables of a Stack from ``new`` into ``into``."""

    def pick(path: tuple, variable: Any, old: Any, fresh: Any) -> Any:
        if _stack(path, variable) != name:
            return old
        return variable.copy(fresh.get_value())

    return jax.tree_util.tree_map_with_path(pick, like, into, new, is_leaf=_is_variable)


def _update_layers(update: Callable, updates: Any, state: Any, params: Any) -> Any:
    """``update`` for every layer: (new updates, new state), (L, ...) leaves."""

    def one_layer(index: jax.Array, *args: Any) -> Any:
        with at_layer(index):
            return update(*args)

    length = jax.tree.leaves(updates)[0].shape[0]
    args = (jnp.arange(length), updates, state, params)
    sharding = _sharding.get()
    if sharding is None:
        return jax.vmap(one_layer)(*args)
    mesh, policy = sharding
    with sharded_update(None, policy):  # a Stack inside a layer is whole with it
        return map_layers(one_layer, args, mesh, policy.min_shard_elements)
