"""Exponential moving averages of the trained parameters, sharded like them."""

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import UserError


def start(params: nnx.State) -> nnx.State:
    """The averages before the first update: copies, in float32 or more.

    Low precision would round small steps away.
    """

    def copy(param: jax.Array) -> jax.Array:
        wide = jnp.promote_types(param.dtype, jnp.float32) if _averaged(param) else None
        # A copy even where the dtype stays: the state's buffers are donated.
        return jnp.array(param, wide, copy=True)

    return jax.tree.map(copy, params)


def update(
    averages: nnx.State | None,
    params: nnx.State,
    decay: float | None,
    steps: jax.Array,
) -> nnx.State | None:
    """The averages after an update; nothing moves between devices.

    ``d * average + (1 - d) * param``, where d is ``min(decay, (1 + steps) / (10 +
    steps))``, so that the initial values are soon forgotten: the formula of
    TensorFlow's ``tf.train.ExponentialMovingAverage`` with ``num_updates``.

    Args:
      averages: those before; None where ``decay`` is.
      params: the parameters after the update.
      decay: what d grows to.
      steps: updates made so far, this one included.

    Raises:
      UserError: there are averages and no decay, or the other way round.
    """
    if averages is None and decay is None:
        return None
    if averages is None or decay is None:
        has = "no averages" if averages is None else "averages"
        raise UserError(
            f"the state has {has} (state.ema), but policy.ema_decay is {decay}; "
            "make the state and the step with the same policy"
        )
    t = steps.astype(float)
    d = jnp.minimum(decay, (1 + t) / (10 + t))

    def move(average: jax.Array, param: jax.Array) -> jax.Array:
        if not _averaged(param):
            return param
        return (d * average + (1 - d) * param).astype(average.dtype)

    return jax.tree.map(move, averages, params)


def _averaged(param: jax.Array) -> bool:
    return jnp.issubdtype(param.dtype, jnp.inexact)
