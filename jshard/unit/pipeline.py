"""The algorithm, software-pipelined: collectives run beside neighbouring layers.

Each iteration unshards the weights of the next layer and reduce-scatters the gradients
of the previous one. Its own layer depends on neither, so both overlap with it. A gather
starts once the one before has arrived, so that XLA combines no two of them. Peeled
off the loop are the last layer of each pass, which has no next layer, and the first
ones of the backward, before there are gradients to scatter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jshard.compat.xla_options import GATHERS_LATE
from jshard.fsdp.mesh import REPLICA
from jshard.unit.parameters import Parameters
from jshard.unit.segments import Layers, StackArrays, Sums, layer_of
from jshard.unit.unit import barrier, unshard_after


def forward(
    run: Callable[[Any, Any, Any], tuple[Any, Any]],
    run_last: Callable[[Any, Any, Any], tuple[Any, Any]],
    arrays: StackArrays,
    bounds: tuple[int, int],
    carry: Any,
    following: Parameters,
    *,
    unroll: bool,
) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Runs at least two layers, and gathers the weights of the next beside each.

    Args:
      run: ``run(index, weights, carry) -> (carry, out)``, one layer in the loop.
      run_last: the same for the last layer, outside the loop.
      arrays: what the layers are made of.
      bounds: (start, stop) of the layers.
      carry: the input of the first layer.
      following: parameters to gather while the last layer runs.
      unroll: whether the layers follow each other without a loop.

    Returns:
      The carry; the outputs of all layers but the last, stacked; that of the last; and
      full weights of the last layer and of ``following``.
    """
    start, stop = bounds

    def step(state, _):
        index, weights, carry = state
        arriving, (carry, weights) = arrays.unshard(index + 1, (carry, weights))
        carry, out = run(index, weights, carry)
        if GATHERS_LATE and not unroll:
            arriving, out = barrier(arriving, out)
        return (index + 1, arriving, carry), out

    weights, carry = arrays.unshard(start, carry)
    state = (jnp.int32(start), weights, carry)
    (_, weights, carry), out = lax.scan(
        step, state, None, length=stop - start - 1, unroll=unroll
    )
    arriving, (carry, weights) = unshard_after(
        (carry, weights), following.shards, following.places
    )
    carry, last = run_last(stop - 1, weights, carry)
    return carry, out, last, (weights, arriving)


def backward(
    layers: Layers, saved: tuple[Any, Any, Any], ys_ct: Any, sums: Sums, arriving: Any
) -> tuple[Sums, Any]:
    """Runs the backward of a segment of at least two layers.

    Args:
      layers: the segment.
      saved: (residuals, kept weights) of all layers but the last, stacked; the same for
        the last; and the weights that the backward of the last layer reads.
      ys_ct: cotangents of the Stack's stacked outputs.
      sums: the sums before the last layer's backward.
      arriving: gradients that are scattered while the last layer's backward runs.

    Returns:
      The sums after the first layer's backward, and ``arriving``.
    """
    segment = layers.segment
    start, last = segment.start, segment.stop - 1
    stacked, (last_residuals, _), weights = saved
    # The all-reduce over replicas takes time, too: it runs beside yet another layer.
    delayed = lax.axis_size(REPLICA) > 1

    def unshard_again(index, sums, here):
        _, kept = layer_of(stacked, index - start)
        shards, arrived = [], (sums.carry, here)
        if kept is None:
            shards, arrived = layers.arrays.shards_after(index, arrived)
        weights, (carry_ct, here) = segment.in_loop.unshard_again(
            kept, shards, arrived, wait=kept is not None
        )
        return weights, sums._replace(carry=carry_ct), here

    def one_layer(unit, index, weights, grads, parts, sums):
        """Runs a layer's backward and its neighbours' collectives.

        Returns the inputs for the layer below: its weights, gradients of this layer's
        full weights, scattered parts that wait for their all-reduce, and sums.
        """
        next_weights = None
        if not isinstance(index, int) or index > start:
            next_weights, sums, weights = unshard_again(index - 1, sums, weights)
        residuals, _ = layer_of(stacked, index - start)
        own_ct = layer_of(ys_ct, index)
        sums, own = layers.transpose(unit, index, weights, residuals, own_ct, sums)
        reduced = None
        if parts is not None:
            reduced = segment.in_loop.all_reduce(parts)
            sums = layers.put(index + 2, reduced, sums)
        parts = segment.in_loop.scatter(grads)
        # The next all-reduce waits for this one: otherwise XLA would combine them.
        (parts, own, _), carry_ct = barrier((parts, own, reduced), sums.carry)
        sums = sums._replace(carry=carry_ct)
        if not delayed:
            sums, parts = layers.finish(index + 1, parts, sums), None
        return next_weights, own, parts, sums

    def step(state, _):
        index, *rest = state
        return (index - 1, *one_layer(segment.in_loop, index, *rest)), None

    next_weights, sums, weights = unshard_again(last - 1, sums, weights)
    last_ys_ct = layer_of(ys_ct, last)
    sums, grads = layers.transpose(
        segment.peeled, last, weights, last_residuals, last_ys_ct, sums
    )
    (arriving, grads), carry_ct = barrier((arriving, grads), sums.carry)
    state: Sequence[Any] = (next_weights, grads, None, sums._replace(carry=carry_ct))
    index = last - 1
    if delayed and index > start:
        state = one_layer(segment.peeled, index, *state)
        index -= 1
    if index > start:
        carried = (jnp.int32(index), *state)
        (_, *state), _ = lax.scan(
            step, carried, None, length=index - start, unroll=segment.unroll
        )
    _, grads, parts, sums = one_layer(segment.peeled, start, *state)
    if parts is not None:
        sums = layers.finish(start + 1, parts, sums)
    return layers.finish(start, segment.in_loop.scatter(grads), sums), arriving
