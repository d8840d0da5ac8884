"""A Stack with prefetch: collectives run beside neighbouring layers.

Each iteration gathers the weights of the next layer and reduce-scatters the gradients
of the previous one. Its own layer depends on neither, so both overlap with it. A gather
starts once the one before has ended, so that XLA combines no two of them; in a
loop on JAX 0.12 a scatter starts once the gather beside it has. Outside of the loop are
the last layer of each pass, which has no next layer, and the first ones of the
backward, before there are gradients to scatter.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.collectives.gather import gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.mesh import REPLICA
from jshard.sharding.settings.scopes import LAYERS
from jshard.sharding.units import layers
from jshard.sharding.units.linearize import Gradients, Inputs, select
from jshard.sharding.units.unit import barrier, gather_again, reduce, scatter
from jshard.system.compat.xla_options import GATHERS_LATE


@jax.named_scope(LAYERS)
def forward(
    next_places: list[Placement],
    keep: bool,
    stacked: Inputs,
    segments: list[layers.Segment],
    next_shards: list[jax.Array],
) -> Any:
    """Does what ``forward`` of ``stack.py`` does."""
    carry, next_weights, all_ys, saved = stacked.carry, [], [], []
    places, end = segments[0].layer.places, segments[-1].stop
    for segment in layers.loops(segments, keep):
        run = functools.partial(layers.run_layer, segment.layer, stacked, keep)
        run_last = functools.partial(layers.run_layer, segment.outside, stacked, keep)
        last, late = segment.stop - 1, GATHERS_LATE and not segment.unroll

        def step(state, _, run=run, late=late):
            index, weights, carry = state
            shards, (carry, weights) = layers.shards_after(
                stacked, places, index + 1, (carry, weights)
            )
            next_weights = gather(shards, places)
            carry, out = run(index, weights, carry)
            if late:
                next_weights, out = barrier(next_weights, out)
            return (index + 1, next_weights, carry), out

        shards, carry = layers.shards_after(stacked, places, segment.start, carry)
        weights = gather(shards, places)
        state = (jnp.int32(segment.start), weights, carry)
        (_, weights, carry), (ys, needed) = lax.scan(
            step, state, None, length=segment.length - 1, unroll=segment.unroll
        )
        if segment.stop == end:
            next_shards, (carry, weights) = barrier(next_shards, (carry, weights))
            next_weights = gather(next_shards, next_places)
        carry, (last_ys, last_needed) = run_last(last, weights, carry)
        all_ys += [ys, jax.tree.map(lambda y: y[None], last_ys)]
        # The backward begins with the last layer, whose weights are here. Those of a
        # single layer would wait for the segments above.
        kept = None
        if segment.length > 1:
            kept = select(weights, segment.layer.needed_in_backward)
        saved.append((needed, last_needed, kept))
    outputs = carry, layers.join_layers(all_ys), next_weights
    return (outputs, (stacked, segments, next_shards, saved)) if keep else outputs


def segment_backward(
    segment: layers.Segment,
    stacked: Inputs,
    needed: tuple[Any, Any],
    sums: Gradients,
    parts: list[Any],
) -> tuple[Gradients, list[Any]]:
    """Does what ``segment_backward`` of ``stack.py`` does."""
    layer, start, last = segment.layer, segment.start, segment.stop - 1
    (saved, ys_ct), places = needed, layer.places
    (residuals, kept), (last_residuals, last_kept), weights = saved
    # The all-reduce over replicas takes time, too: it runs beside yet another layer.
    delayed = lax.axis_size(REPLICA) > 1

    def gather_before(index, kept, weights, sums):
        """Gathers a layer's weights once its neighbour's cotangent and weights are."""
        after = sums.carry, weights
        if kept is None:
            source, after = layers.shards_after(stacked, places, index, after)
            source = select(source, layer.needed_in_backward)
        else:
            source, after = barrier(kept, after)
        carry_ct, weights = after
        gathered = gather_again(source, layer)
        return gathered, weights, sums._replace(carry=carry_ct)

    def transpose(layer, index, residuals, weights, sums):
        """Transposes a layer beside the gather of the next, the one below it."""
        next_weights = None
        if not isinstance(index, int) or index > start:
            next_kept = layers.layer_of(kept, index - 1 - start)
            next_weights, weights, sums = gather_before(
                index - 1, next_kept, weights, sums
            )
        needed = residuals, layers.layer_of(ys_ct, index)
        sums, grads = layers.transpose(layer, stacked, index, weights, needed, sums)
        return next_weights, grads, sums

    def finish(index, parts, sums):
        return layers.add_weights(sums, reduce(parts, places, stacked.weights), index)

    def one_layer(layer, index, weights, grads, parts, sums):
        """Runs a layer's backward beside its neighbours' collectives.

        Returns the inputs for the layer below: its weights, gradients of this layer's
        full weights, scattered parts that wait for their all-reduce, and sums.
        """
        next_weights, grads_here, sums = transpose(
            layer, index, layers.layer_of(residuals, index - start), weights, sums
        )
        if GATHERS_LATE and not segment.unroll:  # else XLA starts the scatter too late
            grads, next_weights = barrier(grads, next_weights)
        reduced = None
        if parts is not None:
            reduced = reduce(parts, places, stacked.weights)
            sums = layers.add_weights(sums, reduced, index + 2)
        # The next all-reduce waits for this one: otherwise XLA would combine them.
        (parts, grads_here, _), sums = layers.before_carry(
            (scatter(grads, places), grads_here, reduced), sums
        )
        if not delayed:
            sums, parts = finish(index + 1, parts, sums), None
        return next_weights, grads_here, parts, sums

    def step(state, _):
        index, *rest = state
        return (index - 1, *one_layer(layer, index, *rest)), None

    if weights is None:
        weights, _, sums = gather_before(last, last_kept, None, sums)
    next_weights, grads, sums = transpose(
        segment.outside, last, last_residuals, weights, sums
    )
    (parts, grads), sums = layers.before_carry((parts, grads), sums)
    if last == start:
        return finish(start, scatter(grads, places), sums), parts
    state: Sequence[Any] = (next_weights, grads, None, sums)
    index = last - 1
    if delayed and index > start:
        state = one_layer(segment.outside, index, *state)
        index -= 1
    if index > start:
        carried, length = (jnp.int32(index), *state), index - start
        unroll = segment.unroll
        (_, *state), _ = lax.scan(step, carried, None, length=length, unroll=unroll)
    _, grads, delayed_parts, sums = one_layer(segment.outside, start, *state)
    if delayed_parts is not None:
        sums = finish(start + 1, delayed_parts, sums)
    return finish(start, scatter(grads, places), sums), parts
