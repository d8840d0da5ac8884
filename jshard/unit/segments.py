"""A Stack's layers in segments: neighbours with the same policy share a loop."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.fsdp.policy import Offload, UnitPolicy
from jshard.unit.linearize import Inputs, LinearizedLayer, TracedLayer
from jshard.unit.parameters import Parameters, scales, unshard
from jshard.unit.unit import ShardedLayer, barrier


@dataclasses.dataclass(frozen=True)
class Segment:
    """Layers ``start`` to ``stop - 1`` of a Stack, which share a loop.

    XLA inlines a loop of one iteration: a single layer is scheduled like a Unit.
    """

    start: int
    stop: int
    in_loop: ShardedLayer  # a layer inside the loop
    peeled: ShardedLayer  # a layer outside the loop
    prefetch: bool  # whether collectives run beside neighbouring layers
    unroll: bool  # whether the layers follow each other without a loop

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.stop - self.start

    def consts(self) -> tuple[list[Any], list[Any]]:
        """Constants of ``in_loop`` and of ``peeled``, passed at the end of ``args``."""
        return self.in_loop.layer.consts, self.peeled.layer.consts


def communicates(own: Parameters) -> bool:
    """Returns whether a layer needs any collective.

    With ``defer_scatter``, weights are gathered once per step, so layers need none.
    """
    return any(
        place.shards() > 1 or (trained and place.sum_at == "unit")
        for place, trained in zip(own.places, own.trained, strict=True)
    )


def spans(policy: UnitPolicy, length: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each run of layers with the same treatment."""
    first = length if policy.first_k is None else min(policy.first_k, length)
    last = length - min(policy.keep_last, length)
    return list(itertools.pairwise(sorted({0, first, last, length})))


def make_segments(
    traced: TracedLayer,
    own: Parameters,
    policy: UnitPolicy,
    length: int,
    prefetch: bool,
) -> Iterator[Segment]:
    """Yields the segments of a Stack of ``length`` layers.

    ``traced`` is one of them, and ``own`` holds the parameters of all. With
    ``prefetch``, collectives run beside neighbouring layers.
    """
    types = own.types(layer=True)
    hosted = any(place.hosted for place in own.places)

    @functools.cache
    def linearized(remat: Any, prevent_cse: bool) -> LinearizedLayer:
        return LinearizedLayer(traced, own.trained, remat, prevent_cse)

    def sharded(remat: Any, reshard: Any, prevent_cse: bool) -> ShardedLayer:
        return ShardedLayer(linearized(remat, prevent_cse), own.places, types, reshard)

    for start, stop in spans(policy, length):
        first = policy.first_k
        remat = policy.remat if first is None or start < first else "none"
        kept = start >= length - policy.keep_last
        reshard = False if kept else policy.reshard_after_forward
        single = stop - start == 1
        pipelined = prefetch and not single
        # XLA moves arrays between host and device in loops; unrolled, it would keep
        # all of them on the device.
        unroll = policy.unroll and not (hosted or isinstance(remat, Offload))
        straight = single or unroll
        in_loop = sharded(remat, reshard, straight)
        peeled = sharded(remat, reshard, True) if pipelined else in_loop
        yield Segment(start, stop, in_loop, peeled, pipelined, unroll)


class Sums(NamedTuple):
    """The gradients that a backward accumulates, or None for inputs without one."""

    carry: Any  # cotangents of the current layer's carry
    args: Any  # of what all layers share
    shards: Any  # (L, ...) each
    xs: Any  # of the other stacked arrays


@dataclasses.dataclass(frozen=True)
class StackArrays:
    """The arrays that a Stack is called with, read one layer at a time."""

    own: Parameters  # (L, ...) each
    xs: Any  # the other arrays of the layers, (L, ...) each
    args: Any  # what all layers share

    def unshard(self, index: Any, carry: Any) -> tuple[list[jax.Array], Any]:
        """Gathers a layer's weights once ``carry`` is computed; returns both."""
        shards, carry = self.shards_after(index, carry)
        places = list(self.own.places)
        return unshard(shards, places, scales(shards, places)), carry

    def shards_after(self, index: Any, arrived: Any) -> tuple[list[jax.Array], Any]:
        """Returns one layer's shards, in device memory, that wait for ``arrived``.

        The barrier stands before the slices, so that XLA casts a shard while it slices
        it, and keeps no slice of the forward for the backward.
        """
        places = self.own.places
        if any(place.hosted for place in places):
            pairs = zip(layer_of(self.own.shards, index), places, strict=True)
            return barrier([place.fetched(shard) for shard, place in pairs], arrived)
        stacked, arrived = barrier(list(self.own.shards), arrived)
        return layer_of(stacked, index), arrived

    # A loop without prefetch copies shards from host memory one layer ahead. Its state
    # is a cursor: (index, the layer's shards that were in host memory).

    def cursor(self, index: int) -> tuple[jax.Array, list[jax.Array]]:
        """Returns a cursor at layer ``index``."""
        return jnp.int32(index), self._fetch(jnp.int32(index))

    def take(self, cursor: tuple, bounds: tuple[int, int], step: int) -> tuple:
        """Returns the shards of the layer at a cursor, and the next cursor.

        ``bounds`` are (start, stop) of the loop's layers; ``step`` is 1 in the forward
        and -1 in the backward.
        """
        (index, fetched), (start, stop) = cursor, bounds
        following = index + step
        if stop - start > 1:
            arriving = self._fetch(jnp.clip(following, start, stop - 1))
        else:
            arriving = fetched
        arrived = iter(fetched)
        shards = [
            next(arrived) if place.hosted else layer_of(shard, index)
            for shard, place in zip(self.own.shards, self.own.places, strict=True)
        ]
        return shards, (following, arriving)

    def _fetch(self, index: Any) -> list[jax.Array]:
        pairs = zip(self.own.shards, self.own.places, strict=True)
        hosted = [shard for shard, place in pairs if place.hosted]
        space = jax.memory.Space.Device
        return [jax.device_put(x, space) for x in layer_of(hosted, index)]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a segment with their arrays, to run one layer at a time."""

    segment: Segment
    arrays: StackArrays
    consts: tuple[list, list]  # segment.consts(), as inputs of what is differentiated

    def forward(
        self, unit: ShardedLayer, index: Any, weights: Any, carry: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """Runs one layer; returns the new carry, and (ys, what its backward needs)."""
        (out, ys), saved = unit.forward(self._inputs(unit, index, weights, carry))
        return out, (ys, saved)

    def transpose(
        self,
        unit: ShardedLayer,
        index: Any,
        weights: Any,
        residuals: Any,
        ys_ct: Any,
        sums: Sums,
    ) -> tuple[Sums, list[Any]]:
        """Runs one layer's backward; returns the sums and gradients of full weights."""
        inputs = self._inputs(unit, index, weights, [])
        grads = unit.layer.transpose(inputs, residuals, (sums.carry, ys_ct))
        of_args = grads.args[: len(self.arrays.args)]
        args = jax.tree.map(lambda a, g: a + g, sums.args, of_args)
        xs = put_layer(sums.xs, grads.xs, index)
        return Sums(grads.carry, args, sums.shards, xs), grads.weights

    def finish(self, index: Any, parts: Sequence[Any], sums: Sums) -> Sums:
        """Adds a layer's gradients, scattered over "fsdp" so far, to the sums."""
        return self.put(index, self.segment.in_loop.all_reduce(parts), sums)

    def put(self, index: Any, grads: Sequence[Any], sums: Sums) -> Sums:
        """Adds a layer's gradients to the sums."""
        return sums._replace(shards=put_layer(sums.shards, grads, index))

    def _inputs(
        self, unit: ShardedLayer, index: Any, weights: Any, carry: Any
    ) -> Inputs:
        consts = self.consts[0 if unit is self.segment.in_loop else 1]
        xs, args = layer_of(self.arrays.xs, index), [*self.arrays.args, *consts]
        return Inputs(weights, xs, carry, args)


def layer_of(stacked: Any, index: Any) -> Any:
    """Returns one layer of a pytree of (L, ...) arrays."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(
            x, index, keepdims=False, allow_negative_indices=False
        ),
        stacked,
    )


def put_layer(stacked: Any, layer: Any, index: Any) -> Any:
    """Returns a pytree of (L, ...) arrays with one layer replaced; None stays None."""
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_index_in_dim(
            x, y, index, 0, allow_negative_indices=False
        ),
        stacked,
        layer,
    )
