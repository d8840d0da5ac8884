"""Skips the update of a step whose loss or gradient norm is a spike.

A spike is above mean + k sigma of the last accepted steps (OLMo 2, arXiv:2501.00656,
section 3, removes what makes them; here their updates are left out). Values that were
skipped are no part of the mean, so that a long run of bad batches stays one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jshard.sharding.settings.precision import at_least_float32
from jshard.system.errors import UserError


class SkipSpikesState(NamedTuple):
    """State of ``skip_spikes``, scalars but for the two windows of values.

    Attributes:
      inner: the inner optimizer's state.
      losses: (window,), those of the last accepted steps, in turns.
      grad_norms: (window,), likewise.
      accepted: int32, total number of accepted steps.
      skipped: int32, total number of skipped steps.
      in_a_row: int32, steps skipped since one was accepted.
    """

    inner: Any
    losses: jax.Array
    grad_norms: jax.Array
    accepted: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array


class SkipSpikes(optax.GradientTransformationExtraArgs):
    """What ``skip_spikes`` returns.

    Attributes:
      inner: the transformation that it was given.
      k: the number of standard deviations.
    """

    inner: optax.GradientTransformationExtraArgs
    k: float


def skip_spikes(
    optimizer: optax.GradientTransformation, k: float = 6.0, window: int = 128
) -> SkipSpikes:
    """Leaves out updates of steps whose loss or gradient norm is a spike.

    A step is skipped if either is above ``mean + k * sigma`` of the last ``window``
    accepted steps (sigma is the population's), or not finite. Until ``window`` steps
    were accepted, only what is not finite is skipped. A skipped step changes nothing:
    not the inner state with its moments and counts, and parameters keep their bits,
    whatever they are. In a step of jshard nor do averages and the model's state.

    It goes around all else, ``skip_spikes(optax.chain(clip, adamw))``; a step of jshard
    refuses it elsewhere, and gives it the norm that it has computed for the metrics.
    With plain optax it is called as ``update(grads, state, params, value=loss)``, and
    computes the gradients' global norm unless that is given as ``grad_norm=``.

    Args:
      optimizer: any optax transformation.
      k: standard deviations above the mean, above 0.
      window: the number of accepted steps that are remembered, at least 2.

    Raises:
      UserError: ``k`` or ``window`` is out of range.
    """
    if not (isinstance(k, int | float) and 0 < k < math.inf):
        raise UserError(f"skip_spikes: k={k!r}: must be a finite number above 0")
    if not (isinstance(window, int) and window >= 2):
        raise UserError(f"skip_spikes: window={window!r}: must be an int, at least 2")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SkipSpikesState:
        values, zero = jnp.zeros(window, float), jnp.zeros((), jnp.int32)
        return SkipSpikesState(inner.init(params), values, values, zero, zero, zero)

    def update(
        updates: Any,
        state: SkipSpikesState,
        params: Any = None,
        *,
        value: Any,
        grad_norm: Any = None,
        **extra: Any,
    ) -> tuple[Any, SkipSpikesState]:
        if grad_norm is None:
            grad_norm = optax.tree.norm(jax.tree.map(at_least_float32, updates))
        spike, _ = judge(k, state, value, grad_norm)
        # x + -0.0 is x for every x; with 0.0 a parameter of -0.0 would become 0.0.
        nothing = jax.tree.map(lambda x: jnp.full_like(x, -0.0), updates)
        new = inner.update(updates, state.inner, params, value=value, **extra)
        new = optax.tree.where(spike, (nothing, state.inner), new)
        return new[0], record(state, spike, value, grad_norm)._replace(inner=new[1])

    made = SkipSpikes(init, update)
    made.inner, made.k = inner, k
    return made


def judge(
    k: float, state: SkipSpikesState, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns whether a step is a spike, and the limits, which are metrics of it."""
    full = state.accepted >= state.losses.shape[0]
    limits, spike = {}, jnp.bool_(False)
    for name, value, before in (
        ("loss", loss, state.losses),
        ("grad_norm", grad_norm, state.grad_norms),
    ):
        limit = jnp.where(full, jnp.mean(before) + k * jnp.std(before), jnp.inf)
        spike |= (jnp.asarray(value, limit.dtype) > limit) | ~jnp.isfinite(value)
        limits[f"{name}_limit"] = limit
    return spike, limits


def record(
    state: SkipSpikesState, spike: jax.Array, loss: jax.Array, grad_norm: jax.Array
) -> SkipSpikesState:
    """Returns what is remembered after a step."""
    here = jnp.arange(state.losses.shape[0]) == state.accepted % state.losses.shape[0]
    put = lambda before, x: jnp.where(here & ~spike, x, before).astype(before.dtype)
    return SkipSpikesState(
        state.inner,
        put(state.losses, loss),
        put(state.grad_norms, grad_norm),
        state.accepted + ~spike,
        state.skipped + spike,
        jnp.where(spike, state.in_a_row + 1, 0),
    )


def decide(
    k: float,
    state: SkipSpikesState,
    loss: jax.Array,
    grad_norm: jax.Array,
    finite: jax.Array | None,
) -> tuple[jax.Array, SkipSpikesState, dict[str, jax.Array]]:
    """Returns whether a step makes an update, what is remembered, and metrics.

    ``finite`` is whether a loss scale lets it; what that skips is no spike.
    """
    spike, metrics = judge(k, state, loss, grad_norm)
    new, takes = record(state, spike, loss, grad_norm), ~spike
    if finite is not None:
        new, takes = optax.tree.where(finite, new, state), takes & finite
    metrics["skipped_steps"] = new.skipped
    metrics["spikes_in_a_row"] = new.in_a_row
    return takes, new, metrics


def within_spikes(optimizer: Any, opt_state: Any) -> Any:
    """Returns what ``skip_spikes`` was given, or an optimizer that is none of it.

    Raises:
      UserError: ``skip_spikes`` is within another transformation.
    """
    inner, state = optimizer, opt_state
    if isinstance(optimizer, SkipSpikes):
        inner, state = optimizer.inner, opt_state.inner
    is_one = lambda x: isinstance(x, SkipSpikesState)
    if any(map(is_one, jax.tree.leaves(state, is_leaf=is_one))):
        raise UserError(
            "optimizer: skip_spikes is within another transformation, which would "
            "change what it judges or go on after a spike; put it around all else: "
            "jshard.optim.skip_spikes(optax.chain(...))"
        )
    return inner
