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

from jshard.partition import LAYER_DIMS, NUM_LAYERS, layer_dims
from jshard.policy import Policy
from jshard.whole_layers import map_layers

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
      stacked: for each number of layers L, the inner state of one layer with a
        leading (L,) on every leaf.
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

    Args:
      tx: any optax transformation, for parameters from ``nnx`` Stacks.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> PerLayerState:
        groups = {
            key: jax.vmap(inner.init)(_lower(tree))
            for key, tree, inner in _groups(params, tx)
        }
        return PerLayerState(tx.init(_select(params, lambda v: not _depth(v))), groups)

    def update(updates: Any, state: PerLayerState, params: Any = None, **extra: Any):
        rest, rest_state = tx.update(
            _select(updates, lambda v: not _depth(v)),
            state.rest,
            None if params is None else _select(params, lambda v: not _depth(v)),
            **extra,
        )
        merged, stacked = rest, {}
        for key, tree, inner in _groups(updates, tx):
            layers = None
            if params is not None:
                layers = _lower(_select(params, lambda v, key=key: _depth(v) == key))
            inner_update = _with_extra(inner, extra)
            new, stacked[key] = _update_layers(
                inner_update, _lower(tree), state.stacked[key], layers
            )
            merged = _merge(merged, new, key, updates)
        return merged, PerLayerState(rest_state, stacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_extra(tx: optax.GradientTransformationExtraArgs, extra: dict) -> Callable:
    return lambda updates, state, params: tx.update(updates, state, params, **extra)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _depth(variable: Any) -> str:
    """The number of layers of a Stack's variable as a key, "" outside Stacks."""
    if not _is_variable(variable) or not layer_dims(variable):
        return ""
    leaves = jax.tree.leaves(variable)
    if not leaves:
        return ""
    return str(variable.get_metadata(NUM_LAYERS, leaves[0].shape[0]))


def _select(tree: Any, wanted: Callable[[Any], bool]) -> Any:
    """``tree`` with MaskedNodes in place of what is not wanted, as optax masks."""

    def pick(variable: Any) -> Any:
        if not _is_variable(variable) or wanted(variable):
            return variable
        return variable.copy(optax.MaskedNode())

    return jax.tree.map(pick, tree, is_leaf=_is_variable)


def _groups(tree: Any, tx: optax.GradientTransformationExtraArgs) -> Iterator[tuple]:
    """(L, the variables of Stacks of L layers, the transformation of one layer)."""
    variables = [
        v for v in jax.tree.leaves(tree, is_leaf=_is_variable) if _is_variable(v)
    ]
    for key in sorted({_depth(v) for v in variables} - {""}):
        members = [v for v in variables if _depth(v) == key]
        nested = any(layer_dims(v) > 1 for v in members)
        chosen = _select(tree, lambda v, key=key: _depth(v) == key)
        yield key, chosen, per_layer(tx) if nested else tx


def _lower(tree: Any) -> Any:
    """Marks variables as having one layer dimension less, for use under a map."""

    def lower(variable: Any) -> Any:
        if not _is_variable(variable) or not layer_dims(variable):
            return variable
        lower = variable.copy(**{LAYER_DIMS: layer_dims(variable) - 1})
        if NUM_LAYERS in lower.get_metadata():
            lower.del_metadata(NUM_LAYERS)
        return lower

    return jax.tree.map(lower, tree, is_leaf=_is_variable)


def _merge(into: Any, new: Any, key: str, like: Any) -> Any:
    """Puts the variables of group ``key`` from ``new`` into ``into``."""

    def pick(variable: Any, old: Any, fresh: Any) -> Any:
        if not _is_variable(variable):
            return old
        if _depth(variable) != key:
            return old
        return variable.copy(fresh.get_value())

    return jax.tree.map(pick, like, into, new, is_leaf=_is_variable)


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
