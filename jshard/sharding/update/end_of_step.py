"""The end of a step: updates the optimizer's state, the parameters and the averages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard.sharding.layout.memory_kinds import on_device, on_host
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import at_least_float32, updated_in
from jshard.sharding.settings.scopes import UPDATE
from jshard.sharding.settings.state import TrainState
from jshard.sharding.update import counts, ema
from jshard.sharding.update.call_optax import check_opt_state, first_state, next_updates
from jshard.sharding.update.skipping import loss_scale
from jshard.sharding.update.skipping.skip_spikes import (
    SkipSpikes,
    SkipSpikesState,
    decide,
)
from jshard.sharding.update.stacks.chain import parts_of
from jshard.sharding.update.stacks.layers_alone import streams
from jshard.sharding.update.streamed_update import streamed_update
from jshard.sharding.update.whole_layers import sharded_update
from jshard.system.errors import UserError

# (parameters, optimizer's state, averages or None)
Moving = tuple[nnx.State, Any, nnx.State | None]
# (gradients, loss, number of updates including this one, whether to; None is yes)
Given = tuple[nnx.State, jax.Array, jax.Array, jax.Array | None]


def first_fields(
    policy: Policy, mesh: Any, optimizer: Any, params: nnx.State, step: jax.Array
) -> dict[str, Any]:
    """Returns the fields of a state before its first step, besides the model's."""
    return {
        "step": step,
        "opt_state": first_state(optimizer, params, mesh),
        "ema": None if policy.ema_decay is None else ema.start(params),
        "loss_scale": loss_scale.start(policy) if policy.loss_scale else None,
    }


def check_state(state: TrainState, policy: Policy, optimizer: Any) -> None:
    """Raises UserError if the state was made with another policy or optimizer.

    Of the policy, that is averages and a loss scale.
    """
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
    check_opt_state(optimizer, state.opt_state, state.params)


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
    takes, scale, history = None, state.loss_scale, None
    norm = optax.tree.norm(jax.tree.map(at_least_float32, grads))
    metrics = {"grad_norm": norm}
    grads = jax.tree.map(lambda g, p: g.astype(updated_in(p)), grads, state.params)
    if scale is not None:
        takes = jnp.isfinite(norm)
        metrics["loss_scale"] = scale.scale
        policy = layout.policy
        limits = policy.loss_scale_window, policy.loss_scale_hysteresis
        scale = loss_scale.update(scale, takes, *limits)
        metrics["skipped_steps"] = scale.skipped
    inner, before = optimizer, state.opt_state
    if isinstance(optimizer, SkipSpikes):
        # The decision is here, so that the norm above serves it, parameters in host
        # memory are still streamed, and averages stay where they are.
        takes, history, told = decide(optimizer.k, before, loss, norm, takes)
        told["skipped_steps"] += metrics.get("skipped_steps", 0)
        metrics |= told
        inner, before = optimizer.inner, before.inner
    if takes is not None or counts.differ_from_steps(before):
        if (count := counts.of_schedules(before)) is not None:
            metrics["optimizer_updates"] = count
    moving = (state.params, before, state.ema)
    given = (grads, loss, _updates(state) + 1, takes)
    params, after, averages = update(layout.mesh, layout.policy, inner, moving, given)
    if (skipped := _skipped(takes, before, after, params)) is not None:
        metrics["skipped"] = skipped
        spoilt = skipped if history is not None else skipped & ~jnp.isfinite(norm)
        model_state = optax.tree.where(spoilt, state.model_state, model_state)
    opt_state = after if history is None else history._replace(inner=after)
    new = dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        ema=averages,
        loss_scale=scale,
    )
    return new, metrics


def _updates(state: TrainState) -> jax.Array:
    """Returns how many updates were made, by the optimizer's count if it has one."""
    made = counts.updates(state.opt_state)
    if made is not None:
        return made
    missed = counts.rejected(state.opt_state)
    made = state.step if missed is None else state.step - missed
    if isinstance(state.opt_state, SkipSpikesState):
        made -= state.opt_state.skipped
    return made if state.loss_scale is None else made - state.loss_scale.skipped


def _skipped(
    takes: jax.Array | None, before: Any, after: Any, params: nnx.State
) -> jax.Array | None:
    """Returns whether a step made no update, as gradients were bad; None if all do."""
    if takes is not None:
        return ~takes
    if (skipped := counts.skipped(before, after)) is None:
        return None
    # After too many in a row, apply_if_finite makes the parameters nan.
    norm = optax.tree.norm(jax.tree.map(at_least_float32, params))
    return skipped & jnp.isfinite(norm)


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
    run = functools.partial(_run, mesh, policy)
    if policy.offload is None:
        return run(optimizer, moving, given)
    params, opt_state, averages = moving
    grads, loss, count, takes = given
    # Optimizers are chains here, whose last parts may all be streamed.
    parts, nothing = parts_of(optimizer), optax.EmptyState()
    states = (opt_state,) if parts is None else opt_state
    stages = [optax.identity(), *(parts or [optimizer]), optax.identity()]
    states = (nothing, *states, nothing)
    number, separate, problem = len(stages), True, None
    while number > 1:
        problem, alone = streams(stages[number - 1], params)
        if problem:
            break
        number, separate = number - 1, separate and alone
    if any(map(on_host, jax.tree.leaves(states[:number]))):
        raise UserError(
            f"policy.offload: {problem}, so the optimizer's state cannot be updated a "
            "layer at a time; write jshard.optim.chain, whose first parts have all "
            "gradients at once, with what looks at whole tensors in per_layer, as in "
            "jshard.optim.chain(optax.clip_by_global_norm(1.0), "
            "jshard.optim.per_layer(optax.lamb(1e-3))), or use offload=None"
        )
    front, layered = optax.chain(*stages[:number]), optax.chain(*stages[number:])
    here = jax.tree.map(on_device, params)
    args = grads, states[:number], here
    grads, first = next_updates(front, *args, value=loss, mesh=mesh)
    if takes is not None:
        first = optax.tree.where(takes, first, states[:number])
    params, last, averages = streamed_update(
        functools.partial(run, layered),
        (params, states[number:], averages),
        (grads, loss, count, takes),
        params,
        separate=separate,
        at_a_time=policy.offload_layers,
    )
    states = (*first, *last)[1:-1]
    return params, states[0] if parts is None else states, averages


def _run(mesh: Mesh, policy: Policy, tx: Any, moving: Moving, given: Given) -> Moving:
    """Updates what is ``moving`` by an optimizer."""
    params, before, averages = moving
    grads, loss, count, takes = given
    with sharded_update(mesh, policy):
        args = grads, before, params
        updates, opt_state = next_updates(tx, *args, value=loss, mesh=mesh)
    params = optax.apply_updates(params, updates)
    if averages is not None:
        assert policy.ema_decay is not None  # see check_state
        moved = ema.update(averages, params, policy.ema_decay, count)
        made = counts.made(before, opt_state)
        averages = moved if made is None else optax.tree.where(made, moved, averages)
    new = (params, opt_state, averages)
    return new if takes is None else optax.tree.where(takes, new, moving)
