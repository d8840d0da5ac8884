"""Exponential moving averages of the trained parameters, sharded like them."""

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.settings.precision import at_least_float32


def start(params: nnx.State) -> nnx.State:
    """Returns the averages before the first update: copies, in float32 or wider.

    Lower precision would round small steps away.
    """
    # Copies even where the dtype stays, because the state's buffers are donated.
    return jax.tree.map(lambda x: jnp.array(at_least_float32(x), copy=True), params)


def update(
    averages: nnx.State, params: nnx.State, decay: float, count: jax.Array
) -> nnx.State:
    """Returns the averages after an update; nothing moves between devices.

    ``d * average + (1 - d) * param``, where d is ``min(decay, (1 + count) / (10 +
    count))``, so that the initial values are soon forgotten: the formula of
    TensorFlow's ``tf.train.ExponentialMovingAverage`` with ``num_updates``. ``params``
    and ``count``, the number of updates so far, are those after the update; steps that
    make none do not count.
    """
    t = count.astype(float)
    d = jnp.minimum(decay, (1 + t) / (10 + t))

    def move(average: jax.Array, param: jax.Array) -> jax.Array:
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            return param
        return (d * average + (1 - d) * param).astype(average.dtype)

    return jax.tree.map(move, averages, params)
