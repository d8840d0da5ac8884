"""Applies optimizers to stacked layers, one layer's tensors at a time.

The optimizer runs on global arrays, so optax transformations are exact without change.
But a Stack's leaf holds L tensors, and an optimizer that looks at entire tensors (their
norms, ranks or factors) must see each of them: ``per_layer``.
"""

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jshard.sharding.layout.layer_dims import layer_dims, stack_of, without_layers
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.whole_layers import check_products
from jshard.system.errors import UserError

# The index of the layer being updated, in each Stack around it.
layers_here = ContextVar[tuple[Any, ...]]("layers_here", default=())
# The index of the first layer that a Stack's arrays hold.
first_layer = ContextVar[Any]("first_layer", default=0)
# Whether an optimizer is asked how it treats layers, which ``per_layer`` says.
asking = ContextVar[bool]("asking", default=False)


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
    """Applies ``tx`` to every layer of a Stack separately, and once to all else.

    For optimizers that treat a leaf as one tensor (LAMB, LARS, Adafactor, adaptive
    clipping) or look at its rank (``ndim >= 2`` masks; for Muon use
    ``jshard.optim.muon``). What spans the entire model stays outside:
    ``jshard.optim.chain(optax.clip_by_global_norm(1.0),
    jshard.optim.per_layer(optax.lamb(1e-3)))``.

    It also says that layers are independent: what is elementwise or reduces is mapped
    over the shards of all layers, and states in host memory (``Policy.offload``) are
    streamed, a layer at a time. Products of matrices need complete layers, which
    ``whole_layers`` asks for; in a step that shards them, others are a UserError.

    Every Stack has its own state: a transformation that looks across parameters
    (``optax.clip_by_global_norm``, say) sees those of one layer of one Stack.

    Args:
      tx: any optax transformation, for parameters from ``nnx`` Stacks.

    Raises:
      UserError: (update) what is updated are arrays without variables, as in the loop
        of an ``nnx.Optimizer``.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> PerLayerState:
        if asking.get():
            return PerLayerState((), {})
        stacked = {
            name: jax.vmap(inner.init)(_of_stack(params, name))
            for name, inner in _stacks(params, tx)
        }
        return PerLayerState(tx.init(_of_stack(params, None)), stacked)

    def update(updates: Any, state: PerLayerState, params: Any = None, **extra: Any):
        if asking.get():
            return updates, state
        if state.stacked and not any(
            map(is_variable, jax.tree.leaves(updates, is_leaf=is_variable))
        ):
            raise UserError(
                "jshard.optim.per_layer: it has been given arrays without their "
                "variables, as an nnx.Optimizer does, and so cannot see which are "
                "stacked layers; in a step of jshard it can: fsdp.init(make_model, tx)"
            )
        of = lambda name: (_of_stack(updates, name), _of_stack(params, name))
        grads, values = of(None)
        new, rest = tx.update(grads, state.rest, values, **extra)
        stacked = dict(state.stacked)
        for name, inner in _stacks(updates, tx):
            grads, values = of(name)
            update_layer = functools.partial(inner.update, **extra)
            args = (grads, state.stacked[name], values)
            layers, stacked[name] = _update_layers(update_layer, args)
            new = _merge(new, layers, name, updates)
        return new, PerLayerState(rest, stacked)

    return optax.GradientTransformationExtraArgs(init, update)


def stack_name(path: tuple, variable: Any) -> str | None:
    """Returns the name of a variable's Stack; None if it has none or is masked."""
    if not is_variable(variable) or not jax.tree.leaves(variable):
        return None
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    stack = stack_of(tuple(names), variable)
    return None if stack is None else ".".join(stack) or "model"


def _of_stack(tree: Any, name: str | None) -> Any:
    """Selects a Stack's variables, for use under a map, and masks all others."""

    def pick(path: tuple, variable: Any) -> Any:
        if not is_variable(variable):
            return variable
        if stack_name(path, variable) != name:
            return variable.copy(optax.MaskedNode())
        return variable if name is None else without_layers(variable)

    return jax.tree_util.tree_map_with_path(pick, tree, is_leaf=is_variable)


def _stacks(tree: Any, tx: optax.GradientTransformationExtraArgs) -> Iterator[tuple]:
    """Yields each Stack's name and the transformation of one of its layers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
    named = [(stack_name(path, leaf), leaf) for path, leaf in leaves]
    for name in sorted({name for name, _ in named if name is not None}):
        nested = any(layer_dims(leaf) > 1 for stack, leaf in named if stack == name)
        yield name, per_layer(tx) if nested else tx


def _merge(into: Any, new: Any, name: str, like: Any) -> Any:
    """Replaces the variables of a Stack in ``into`` by those of ``new``."""

    def pick(path: tuple, variable: Any, old: Any, fresh: Any) -> Any:
        chosen = stack_name(path, variable) == name
        return variable.copy(fresh.get_value()) if chosen else old

    return jax.tree_util.tree_map_with_path(pick, like, into, new, is_leaf=is_variable)


def _update_layers(update: Callable, args: tuple) -> Any:
    """Maps ``update`` over (L, ...) leaves; returns the new updates and state."""

    def one_layer(index: jax.Array, *args: Any) -> Any:
        layers = (*layers_here.get(), index)
        with within(layers_here, layers), within(first_layer, 0):
            return update(*args)

    length = jax.tree.leaves(args)[0].shape[0]
    of_one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    check_products(one_layer, (jnp.int32(0), *jax.tree.map(of_one, args)))
    return jax.vmap(one_layer)(first_layer.get() + jnp.arange(length), *args)
