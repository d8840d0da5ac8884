"""The update that ends a step: optimizer, parameters, averages."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard.layout.layers import layer_dims
from jshard.layout.layout import Layout
from jshard.layout.specs import follow
from jshard.optim import ema, loss_scale
from jshard.optim.per_layer import sharded_update
from jshard.optim.streamed_update import streamed_update
from jshard.precision import for_update, updated_in
from jshard.state import TrainState

# (parameters, optimizer's state, averages or None)
Moving = tuple[nnx.State, Any, nnx.State | None]
# (gradients, updates made after this one, whether to make it; None is yes)
Given = tuple[nnx.State, jax.Array, jax.Array | None]


def next_state(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: nnx.State,
    model_state: nnx.State,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after a step, and the metrics of its gradients.

    Args:
      layout: of the state.
      optimizer: the transformation the state was made with.
      state: before the step.
      grads: global arrays sharded like their parameters.
      model_state: after the forward.
    """
    steps, finite, scale = state.step + 1, None, state.loss_scale
    metrics = {"grad_norm": _norm(grads)}
    grads = jax.tree.map(lambda g, p: g.astype(updated_in(p)), grads, state.params)
    if scale is not None:
        finite = jnp.isfinite(metrics["grad_norm"])
        model_state = loss_scale.select(finite, model_state, state.model_state)
        metrics["loss_scale"] = scale.scale
        scale = loss_scale.update(scale, finite)
        metrics["skipped_steps"] = scale.skipped
    moving, given = (state.params, state.opt_state, state.ema), (grads, steps, finite)
    params, opt_state, averages = update(layout, optimizer, moving, given)
    new = dataclasses.replace(
        state,
        step=steps,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        ema=averages,
        loss_scale=scale,
    )
    return new, metrics


def update(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    moving: Moving,
    given: Given,
) -> Moving:
    """One update, on globally-shaped arrays sharded like their parameters.

    Arrays in host memory (``Policy.offload``) are streamed through it.

    Raises:
      UserError: the state and the policy do not agree on averages, or there are arrays
        in host memory and the optimizer does not treat layers independently.
    """
    plain = functools.partial(_update, layout, optimizer)
    if layout.policy.offload is None:
        return plain(moving, given)
    params, _, averages = moving
    grads, *others = given
    layer = _one_layer(params)
    cut = (
        layer,
        jax.eval_shape(lambda layer: optimizer.init(for_update(layer)), layer),
        None if averages is None else jax.eval_shape(ema.start, layer),
    )
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    cut_given = (_one_layer(grads), *jax.tree.map(abstract, others))
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    leaves = jax.tree_util.tree_leaves_with_path(moving)
    owners = list(itertools.starmap(follow(params, names), leaves))
    return streamed_update(plain, moving, given, (cut, cut_given), owners)


def _update(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    moving: Moving,
    given: Given,
) -> Moving:
    params, opt_state, averages = moving
    grads, steps, finite = given
    with sharded_update(layout.mesh, layout.policy):
        wide = for_update(params)
        updates, opt_state = optimizer.update(grads, opt_state, wide)
    params = optax.apply_updates(params, updates)
    new = (
        params,
        opt_state,
        ema.update(averages, params, layout.policy.ema_decay, steps),
    )
    return new if finite is None else loss_scale.select(finite, new, moving)


def _norm(grads: nnx.State) -> jax.Array:
    """Of all gradients, in float32 or more, where squares and their sums fit."""
    widen = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))
    return optax.tree.norm(jax.tree.map(widen, grads))


def _one_layer(params: nnx.State) -> nnx.State:
    """Abstract parameters with each Stack cut to one layer."""

    def cut(variable: nnx.Variable) -> nnx.Variable:
        x = variable.get_value()
        shape = (1, *x.shape[1:]) if layer_dims(variable) else x.shape
        return variable.copy(jax.ShapeDtypeStruct(shape, x.dtype))

    is_variable = lambda v: isinstance(v, nnx.Variable)
    return jax.tree.map(cut, params, is_leaf=is_variable)
