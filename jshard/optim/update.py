"""The end of a step: updates the optimizer's state, the parameters and the averages."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard.errors import UserError
from jshard.fsdp.policy import Policy
from jshard.fsdp.precision import at_least_float32, for_update, updated_in
from jshard.fsdp.scopes import UPDATE
from jshard.fsdp.state import TrainState
from jshard.layout.layers import layer_dims
from jshard.layout.layout import Layout
from jshard.layout.specs import follow
from jshard.layout.variables import is_variable
from jshard.optim import ema, loss_scale
from jshard.optim.per_layer import sharded_update
from jshard.optim.streamed_update import streamed_update

# (parameters, optimizer's state, averages or None)
Moving = tuple[nnx.State, Any, nnx.State | None]
# (gradients, loss, number of updates including this one, whether to; None is yes)
Given = tuple[nnx.State, jax.Array, jax.Array, jax.Array | None]


def first_fields(
    policy: Policy, optimizer: Any, params: nnx.State, step: jax.Array
) -> dict[str, Any]:
    """Returns the fields of a state before its first step, besides the model's."""
    return {
        "step": step,
        "opt_state": optimizer.init(for_update(params)),
        "ema": None if policy.ema_decay is None else ema.start(params),
        "loss_scale": loss_scale.start() if policy.loss_scale else None,
    }


def check_state(state: TrainState, policy: Policy) -> None:
    """Raises UserError if state and policy disagree on averages or a loss scale."""
    decay, scaled = policy.ema_decay, policy.loss_scale
    for field, has, lacks, expected, setting in (
        ("ema", "averages", "no averages", decay is not None, f"ema_decay is {decay}"),
        ("loss_scale", "a scale", "no scale", scaled, f"loss_scale is {scaled}"),
    ):
        present = getattr(state, field) is not None
        if present != expected:
            raise UserError(
                f"the state has {has if present else lacks} (state.{field}), but "
                f"policy.{setting}; make the state and the step with the same policy"
            )


@jax.named_scope(UPDATE)
def next_state(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: nnx.State,
    model_state: nnx.State,
    loss: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after a step, and the metrics of its gradients.

    ``grads`` are global arrays sharded like their parameters, ``model_state`` is the
    model's state after the forward, and ``loss`` that of the global batch.
    """
    steps, finite, scale = state.step + 1, None, state.loss_scale
    norm = optax.tree.norm(jax.tree.map(at_least_float32, grads))
    metrics = {"grad_norm": norm}
    grads = jax.tree.map(lambda g, p: g.astype(updated_in(p)), grads, state.params)
    if scale is not None:
        finite = jnp.isfinite(norm)
        model_state = loss_scale.select(finite, model_state, state.model_state)
        metrics["loss_scale"] = scale.scale
        scale = loss_scale.update(scale, finite)
        metrics["skipped_steps"] = scale.skipped
    moving = (state.params, state.opt_state, state.ema)
    given = (grads, loss, steps, finite)
    params, opt_state, averages = update(
        layout.mesh, layout.policy, optimizer, moving, given
    )
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
    mesh: Mesh,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    moving: Moving,
    given: Given,
) -> Moving:
    """Updates globally-shaped arrays that are sharded like their parameters.

    Arrays in host memory (``Policy.offload``) are streamed through the update.

    Raises:
      UserError: arrays are in host memory, and the optimizer does not treat layers
        independently.
    """

    def run(moving: Moving, given: Given) -> Moving:
        params, opt_state, averages = moving
        grads, loss, steps, finite = given
        with sharded_update(mesh, policy):
            updates = grads, opt_state, for_update(params)
            updates, opt_state = _update_with(optimizer, loss, *updates)
        params = optax.apply_updates(params, updates)
        if averages is not None:
            assert policy.ema_decay is not None  # see check_state
            averages = ema.update(averages, params, policy.ema_decay, steps)
        new = (params, opt_state, averages)
        return new if finite is None else loss_scale.select(finite, new, moving)

    if policy.offload is None:
        return run(moving, given)
    params, _, averages = moving
    layer = _one_layer(params)
    opt_state = jax.eval_shape(lambda layer: optimizer.init(for_update(layer)), layer)
    cut = (layer, opt_state, averages and jax.eval_shape(ema.start, layer))
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    leaves = jax.tree_util.tree_leaves_with_path(moving)
    owners = list(itertools.starmap(follow(params, names), leaves))
    return streamed_update(run, moving, given, (cut, _one_layer(given)), owners)


def _update_with(optimizer: Any, loss: jax.Array, *args: Any) -> tuple[Any, Any]:
    """Calls ``optimizer.update``, with ``value=loss`` where it takes more arguments.

    Raises:
      UserError: it needs arguments that a step does not have.
    """
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer.update(*args)
    try:
        return optimizer.update(*args, value=loss)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise UserError(
            f"optimizer: {error}; a step has the gradients and value=, the loss, and "
            "no more: no line search, say"
        ) from error


def _one_layer(tree: Any) -> Any:
    """Returns an abstract tree with the arrays of each Stack cut to one layer."""

    def cut(x: Any) -> Any:
        if not is_variable(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        value = x.get_value()
        shape = (1, *value.shape[1:]) if layer_dims(x) else value.shape
        return x.copy(jax.ShapeDtypeStruct(shape, value.dtype))

    return jax.tree.map(cut, tree, is_leaf=is_variable)
