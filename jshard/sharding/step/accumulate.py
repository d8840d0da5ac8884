"""Gradient accumulation: a step as a scan over micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.layout.microbatches import Micro
from jshard.sharding.layout.values.random_streams import merge_state
from jshard.sharding.settings.loss import Means, seeds
from jshard.sharding.settings.maximum import before_all
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.loss_counts import count
from jshard.sharding.step.program.traced import Forward


def micro_batches(
    forward: Forward,
    arrays: ModelArrays,
    micro: Micro,
    dtypes: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Means, list[Any], nnx.State]:
    """Scans micro-batches; adds up gradients and Means.

    Returns both, the global counts of the loss, and the next state.

    Args:
      forward: ``forward(params, frozen, state, batch, index)`` runs one micro-batch.
      arrays: as one device has them.
      micro: this device's micro-batches.
      dtypes: those in which gradients are added up.
      scale: scales the loss in the backward; None is 1.
    """
    first = count(forward, arrays, micro)
    last = len(micro[1]) - 1

    def body(carry, slices):
        sums, means, state = carry
        # Without the barrier XLA moves gathers, whose shards are the same for every
        # micro-batch, out of the loop, and keeps the full weights for all of it.
        batch, index = slices  # the index is the same everywhere and needs no barrier
        (params, frozen), batch = lax.optimization_barrier((arrays[:2], batch))
        rest = (frozen, state, batch, index)
        _, pullback, (own, after) = jax.vjp(
            lambda params: forward(params, *rest), params, has_aux=True
        )
        (grads,) = pullback(seeds(own.loss, first.counts, first.totals, scale))
        sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)
        state = merge_state(state, after, last=index == last)
        return (sums, own + means, state), None  # with its own weights

    zeros = jax.tree.map(lambda x, d: jnp.zeros(x.shape, d), arrays.params, dtypes)
    none = before_all(Means(*forward.shapes[:2]))
    (grads, means, after), _ = lax.scan(body, (zeros, none, arrays.model_state), micro)
    return grads, means, first.counts, after
