"""A Stack's passes: every layer forward, and every layer backward.

Forward, a layer at a time: all_gather its weights, run it, drop them, keep the
residuals that ``remat`` allows. Backward, in reverse: all_gather the weights that the
gradient reads, rebuild what was not kept, transpose the layer, reduce_scatter its
gradients. ``jshard.unit.pipeline`` has the order of it all, with prefetch or without.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.comm.varying import abstract_like, is_float, vary, zeros_like
from jshard.layout.placement import Placement
from jshard.mesh import REPLICA, overlaps
from jshard.policy import UnitPolicy
from jshard.unit.linearize import LinearizedLayer
from jshard.unit.pipeline import Layers, layer_of, put_layer
from jshard.unit.segments import Segment, cut, moves
from jshard.unit.unit import carry_like, check_carry, floats
from jshard.unit.weights import (
    full,
    gather_all,
    gather_read,
    hold,
    keep,
    scatter,
    scatter_shards,
    sum_shards,
    to_gather,
)


def run_stack(
    fn: Callable[[list, list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Sequence[jax.Array],
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
    next_shards: Sequence[jax.Array] = (),
    next_places: Sequence[Placement] = (),
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Scans ``fn(weights, xs, carry, args) -> [*carry, *ys]`` over stacked layers.

    Args:
      fn: one layer on flat lists of arrays.
      shards: local shards of the layers' own parameters, (L, ...) each.
      places: their placements.
      xs: what else belongs to each layer, (L, ...) each.
      carry: enters the first layer.
      args: the same for every layer.
      policy: remat, reshard and prefetch.
      moving_xs: which of ``xs`` have gradients.
      next_shards: of a unit that follows, gathered here, while the last layer runs.
      next_places: their placements.

    Returns:
      The last carry, the layers' ys stacked, and the weights of ``next_shards``.
    """
    carry, args = [vary(x) for x in carry], [vary(x) for x in args]
    trained = [p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)]

    shard_types = [abstract_like(s, layer=True) for s in shards]

    def linearize(remat: Any, *, prevent_cse: bool) -> LinearizedLayer:
        return LinearizedLayer(
            fn,
            full(shard_types, places),
            [abstract_like(x, layer=True) for x in xs],
            [abstract_like(x) for x in carry],
            [abstract_like(x) for x in args],
            differentiable=[*trained, *moving_xs, *map(is_float, [*carry, *args])],
            remat=remat,
            prevent_cse=prevent_cse,
        )

    length = next(x.shape[0] for x in [*shards, *xs])
    prefetch = overlaps() if policy.prefetch is None else policy.prefetch
    prefetch = prefetch and moves(places, trained, shard_types)
    segments = cut(policy, length, linearize, prefetch)
    layer = segments[0].layer
    check_carry(carry, layer.outputs)
    passes = _Passes(
        segments=segments,
        places=places,
        next_places=next_places,
        trained=trained,
        next_trained=[
            p.trainable and is_float(s)
            for s, p in zip(next_shards, next_places, strict=True)
        ],
        moving_xs=moving_xs,
        num_carry=len(carry),
        shard_types=shard_types,
        next_types=[abstract_like(s) for s in next_shards],
    )
    run = jax.custom_vjp(passes.evaluate)
    run.defvjp(passes.forward, passes.backward)
    return run(list(shards), list(xs), carry, [*args, *layer.consts], list(next_shards))


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Forward and backward of all layers, on flat lists of arrays.

    What a backward adds up, its sums, are the cotangents of the carry and of the args,
    and the gradients of the stacked shards and xs.
    """

    segments: Sequence[Segment]
    places: Sequence[Placement]
    next_places: Sequence[Placement]
    trained: Sequence[bool]
    next_trained: Sequence[bool]
    moving_xs: Sequence[bool]
    num_carry: int
    shard_types: Sequence[jax.ShapeDtypeStruct]
    next_types: Sequence[jax.ShapeDtypeStruct]

    def evaluate(self, shards, xs, carry, args, next_shards):
        """Outputs alone."""
        layer, length = self.segments[0].layer, self.segments[-1].stop

        def body(index, here, carry, _):
            if length == 1:
                here, carry = hold(here, carry)
            weights = gather_all(here, self.places)
            outputs = layer.call(weights, layer_of(xs, index), carry, args)
            return self._split(outputs, carry)

        layers = Layers(shards, self.places, 0, length)
        carry, ys = layers.in_turn(body, carry, None)
        following, carry = self._gather_next(next_shards, carry)
        return carry, ys, following

    def forward(self, shards, xs, carry, args, next_shards):
        """Outputs, and what the backward needs."""
        ys, saved, following = [], [], None
        for segment in self.segments:
            layers = Layers(shards, self.places, segment.start, segment.stop)
            if segment.ahead:
                wanted = next_shards if segment is self.segments[-1] else []
                carry, some_ys, kept, following = self._forward_ahead(
                    segment, layers, xs, carry, args, wanted
                )
                ys += some_ys
            else:
                carry, some_ys, kept = self._forward_in_turn(
                    segment, layers, xs, carry, args
                )
                ys.append(some_ys)
            saved.append(kept)
        if not self.segments[-1].ahead:
            following, carry = self._gather_next(next_shards, carry)
        ys = [_concatenate(parts) for parts in zip(*ys, strict=True)]
        return (carry, ys, following), (shards, xs, args, saved)

    def _forward_in_turn(self, segment, layers, xs, carry, args):
        def body(index, here, carry, _):
            if segment.single:
                here, carry = hold(here, carry)
            weights = gather_all(here, self.places)
            return self._layer(segment, segment.layer, index, weights, xs, carry, args)

        carry, (ys, kept) = layers.in_turn(body, carry, None)
        return carry, ys, kept

    def _forward_ahead(self, segment, layers, xs, carry, args, next_shards):
        following = []

        def load(index, carry):
            here, carry = hold(layers.here(index), carry)
            return gather_all(here, self.places), carry

        def body(index, weights, carry):
            return self._layer(segment, segment.layer, index, weights, xs, carry, args)

        def last(index, weights, carry):
            following[:], carry = self._gather_next(next_shards, carry)
            return self._layer(segment, segment.alone, index, weights, xs, carry, args)

        carry, (ys, kept), (last_ys, last_kept), weights = layers.forward_ahead(
            load, body, last, carry
        )
        # The backward begins with the last layer, whose weights are there already.
        weights = [weights[i] for i in segment.layer.weights_read]
        ys = [ys, [y[None] for y in last_ys]]
        return carry, ys, (kept, last_kept, weights), following

    def _layer(self, segment, layer, index, weights, xs, carry, args):
        """One layer: the carry after it, its ys, and what its backward is left."""
        outputs, kept = layer.forward(weights, layer_of(xs, index), carry, args)
        weights = keep(weights, self.places, layer.weights_read, segment.reshard)
        carry, ys = self._split(outputs, carry)
        return carry, (ys, (kept, weights))

    def backward(self, residuals, cotangents):
        """Gradients of what the forward was given."""
        shards, xs, args, saved = residuals
        outputs = self.segments[0].layer.outputs
        carry, ys = outputs[: self.num_carry], outputs[self.num_carry :]
        carry_ct, ys_ct = floats(cotangents[0], carry), floats(cotangents[1], ys)
        next_grads = [
            grad if trained else None
            for grad, trained in zip(cotangents[2], self.next_trained, strict=True)
        ]
        parts = scatter_shards(next_grads, self.next_places)
        if not self.segments[-1].ahead:
            parts, carry_ct = hold(parts, carry_ct)
        sums = (
            carry_ct,
            [zeros_like(a) for a in args if is_float(a)],
            _zeros(shards, self.trained),
            _zeros(xs, self.moving_xs),
        )
        for segment, kept in reversed(list(zip(self.segments, saved, strict=True))):
            layers = Layers(shards, self.places, segment.start, segment.stop)
            if segment.ahead:
                last = segment is self.segments[-1]
                sums, arrived = self._backward_ahead(
                    segment, layers, xs, args, kept, ys_ct, sums, parts if last else []
                )
                parts = arrived if last else parts
            else:
                sums = self._backward_in_turn(
                    segment, layers, xs, args, kept, ys_ct, sums
                )
        carry_ct, args_ct, grads, xs_grads = sums
        moving = iter(carry_ct)
        carry_grads = [next(moving) if is_float(c) else None for c in carry]
        moving = iter(args_ct)
        arg_grads = [next(moving) if is_float(a) else None for a in args]
        next_grads = sum_shards(parts, self.next_types)
        return grads, xs_grads, carry_grads, arg_grads, next_grads

    def _backward_in_turn(self, segment, layers, xs, args, kept, ys_ct, sums):
        read, reshard = segment.layer.weights_read, segment.reshard

        def body(index, here, sums, slices):
            (kept, weights), ys_ct = slices
            needed = to_gather(weights, here, read)
            if segment.single and reshard:
                needed, carry_ct = hold(needed, sums[0])
                sums = (carry_ct, *sums[1:])
            weights = gather_read(needed, self.places, read, reshard)
            sums, layer_grads = self._transposed(
                segment.layer, index, weights, xs, args, kept, ys_ct, sums
            )
            parts = scatter(layer_grads, self.places, self.shard_types)
            return self._put(parts, index, sums), None

        ys_ct = [ct[segment.start : segment.stop] for ct in ys_ct]
        sums, _ = layers.in_turn(body, sums, (kept, ys_ct), reverse=True)
        return sums

    def _backward_ahead(self, segment, layers, xs, args, kept, ys_ct, sums, arriving):
        """The sums, and ``arriving``: there once the last layer's backward is."""
        stacked, last_kept, last_weights = kept
        read, reshard = segment.layer.weights_read, segment.reshard
        arrived = []

        def kept_at(index):
            if isinstance(index, int) and index == segment.stop - 1:
                return last_kept
            leaves, tree = jax.tree.flatten(stacked)
            return jax.tree.unflatten(tree, layer_of(leaves, index - segment.start))

        def load(index, sums):
            _, weights = kept_at(index)
            here = layers.here(index) if weights is None else []
            needed, carry_ct = hold(to_gather(weights, here, read), sums[0])
            weights = gather_read(needed, self.places, read, reshard)
            return weights, (carry_ct, *sums[1:])

        def step(layer, index, weights, sums):
            return self._transposed(
                layer, index, weights, xs, args, kept_at(index)[0],
                layer_of(ys_ct, index), sums,
            )  # fmt: skip

        def alone(index, weights, sums):
            sums, grads = step(segment.alone, index, weights, sums)
            if index == segment.stop - 1:
                arrived[:], carry_ct = hold(arriving, sums[0])
                sums = (carry_ct, *sums[1:])
            return sums, grads

        def scattered(grads, following, sums):
            parts, carry_ct = scatter_shards(grads, self.places), sums[0]
            if following is not None:
                (parts, following), carry_ct = hold((parts, following), carry_ct)
            return parts, following, (carry_ct, *sums[1:])

        def put(index, parts, sums):
            return self._put(sum_shards(parts, self.shard_types), index, sums)

        weights: list[Any] = [None] * len(self.places)
        for i, weight in zip(read, last_weights, strict=True):
            weights[i] = weight
        body = functools.partial(step, segment.layer)
        late = lax.axis_size(REPLICA) > 1
        sums = layers.backward_ahead(
            load, body, alone, scattered, put, weights, sums, late=late
        )
        return sums, arrived

    def _transposed(self, layer, index, weights, xs, args, kept, ys_ct, sums):
        """One layer's backward: the sums after it, and gradients of whole weights."""
        carry_ct, args_ct, grads, xs_grads = sums
        layer_grads, layer_xs_grads, carry_grads, arg_grads = layer.backward(
            weights, layer_of(xs, index), args, kept, [*carry_ct, *ys_ct]
        )
        moved = [g for g, a in zip(arg_grads, args, strict=True) if is_float(a)]
        args_ct = [a + g for a, g in zip(args_ct, moved, strict=True)]
        carry_ct = [g for g in carry_grads if g is not None]
        xs_grads = put_layer(xs_grads, layer_xs_grads, index)
        return (carry_ct, args_ct, grads, xs_grads), layer_grads

    def _put(self, parts, index, sums):
        carry_ct, args_ct, grads, xs_grads = sums
        return carry_ct, args_ct, put_layer(grads, parts, index), xs_grads

    def _split(self, outputs, carry):
        """A layer's outputs as (carry, ys)."""
        return carry_like(outputs[: self.num_carry], carry), outputs[self.num_carry :]

    def _gather_next(self, next_shards, carry):
        """The next unit's weights, not before ``carry`` is there; and the carry."""
        if not next_shards:
            return [], carry
        here, carry = hold(next_shards, carry)
        return gather_all(here, self.next_places), carry


def _zeros(stacked: Sequence[jax.Array], wanted: Sequence[bool]) -> list[Any]:
    return [zeros_like(x) if w else None for x, w in zip(stacked, wanted, strict=True)]


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
