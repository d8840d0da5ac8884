"""Gradient accumulation: a step as a scan over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.layout.microbatches import Micro
from jshard.sharding.layout.values.random_streams import merge_state
from jshard.sharding.settings.count import add_up, sum_of
from jshard.sharding.settings.loss import Means, seeds
from jshard.sharding.settings.maximum import before_all
from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.program.traced import Needs
from jshard.system.compat.jaxprs import without_dead_code


def accumulate(
    forward: Callable,
    needs: Needs,
    shapes: tuple,
    arrays: ModelArrays,
    micro: Micro,
    dtypes: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Means, nnx.State, list[Any]]:
    """Scans micro-batches; adds up gradients and Means.

    Returns both, the next state, and the global counts of the loss.

    Args:
      forward: ``forward(params, frozen, state, batch, index)`` runs one micro-batch.
      needs: what the counts of its loss depend on.
      shapes: the abstract results of what was traced: the loss, the named Means, the
        weights of terms that the step computes, and the next state.
      arrays: as one device has them.
      micro: this device's micro-batches.
      dtypes: those in which gradients are added up.
      scale: scales the loss in the backward; None is 1.
    """
    counts, totals = _count(forward, needs, shapes, arrays, micro)
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
        (grads,) = pullback(seeds(own.loss, counts, totals, scale))
        sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)
        state = merge_state(state, after, last=index == last)
        return (sums, own + means, state), None  # with its own weights

    zeros = jax.tree.map(lambda x, d: jnp.zeros(x.shape, d), arrays.params, dtypes)
    none = before_all(Means(*shapes[:2]))
    sums, _ = lax.scan(body, (zeros, none, arrays.model_state), micro)
    return *sums, counts


def _count(
    forward: Callable, needs: Needs, shapes: tuple, arrays: ModelArrays, micro: Micro
) -> tuple[list[Any], list[Any]]:
    """Returns the global counts of the loss's terms, by a pass for them alone.

    The total of a term whose count is trained is returned, too, which takes the whole
    forward; that of another is None.
    """

    def chosen(means: Means, after: nnx.State) -> tuple:
        terms = [mean for _, mean in means.loss.terms]
        trained = zip(terms, needs.params, strict=True)
        totals = [mean.total if needed else None for mean, needed in trained]
        return [mean.count for mean in terms], totals, after if needs.state else None

    structure = jax.tree.structure(chosen(Means(*shapes[:2]), shapes[3]))

    def one(state, slices):
        leaves, tree = jax.tree.flatten((*arrays[:2], state, *slices))

        def of_leaves(*leaves):
            _, results = forward(*jax.tree.unflatten(tree, leaves))
            return jax.tree.leaves(chosen(*results))

        found = without_dead_code(of_leaves)(*leaves)
        *found, after = jax.tree.unflatten(structure, found)
        if needs.state:
            state = merge_state(state, after, last=slices[1] == len(micro[1]) - 1)
        return state, found

    def globally(x: Any) -> Any:
        return None if x is None else add_up(sum_of(x), manual_axes())

    _, (counts, totals) = lax.scan(one, arrays.model_state, micro)
    return list(map(globally, counts)), list(map(globally, totals))
