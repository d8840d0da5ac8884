"""A Stack's layers in segments that are treated alike, and single layers of those."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.comm.varying import varying
from jshard.mesh import FSDP, manual_axes
from jshard.policy import UnitPolicy
from jshard.unit.linearize import LinearizedLayer, TracedLayer
from jshard.unit.unit import Parameters, ShardedLayer


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring layers of a Stack that are treated alike, in loops of their own.

    XLA inlines a loop of one trip: a layer on its own is scheduled like a Unit.

    Attributes:
      start: the first layer.
      stop: the layer after the last.
      unit: a layer in a loop.
      alone: the same outside of one.
      prefetch: whether transfers run beside neighbouring layers.
    """

    start: int
    stop: int
    unit: ShardedLayer
    alone: ShardedLayer
    prefetch: bool

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.stop - self.start

    def consts(self) -> tuple[list[Any], list[Any]]:
        """What ``unit`` and ``alone`` want to be at the end of their ``args``."""
        return self.unit.layer.consts, self.alone.layer.consts


def moves(own: Parameters) -> bool:
    """Whether a layer gathers weights, or sums gradients over devices.

    Where whole weights are gathered once a step (``defer_scatter``) it does neither.
    """
    sharded = lax.axis_size(FSDP) > 1
    return any(
        (sharded and place.dim is not None)
        or (trained and set(varying(shard)) != set(manual_axes()))
        for shard, place, trained in zip(
            own.types(layer=True), own.places, own.trained, strict=True
        )
    )


def spans(policy: UnitPolicy, length: int) -> list[tuple[int, int]]:
    """From which layer to before which others are treated like it."""
    first = length if policy.first_k is None else min(policy.first_k, length)
    last = length - min(policy.keep_last, length)
    return list(itertools.pairwise(sorted({0, first, last, length})))


def cut(
    traced: TracedLayer,
    own: Parameters,
    policy: UnitPolicy,
    length: int,
    prefetch: bool,
) -> list[Segment]:
    """The segments of so many layers.

    Args:
      traced: one layer.
      own: the layers' parameters.
      policy: of the Stack.
      length: of the Stack.
      prefetch: whether transfers run beside neighbouring layers.
    """
    types = own.types(layer=True)

    # A layer is linearized once for each way in which it is.
    @functools.cache
    def linearized(remat: Any, prevent_cse: bool) -> LinearizedLayer:
        return LinearizedLayer(traced, own.trained, remat, prevent_cse)

    def sharded(remat: Any, reshard: Any, prevent_cse: bool) -> ShardedLayer:
        return ShardedLayer(linearized(remat, prevent_cse), own.places, types, reshard)

    segments = []
    for start, stop in spans(policy, length):
        first = policy.first_k
        remat = policy.remat if first is None or start < first else "none"
        kept = start >= length - policy.keep_last
        reshard = False if kept else policy.reshard_after_forward
        single = stop - start == 1
        unit = sharded(remat, reshard, prevent_cse=single)
        ahead = prefetch and not single
        alone = sharded(remat, reshard, prevent_cse=True) if ahead else unit
        segments.append(Segment(start, stop, unit, alone, ahead))
    return segments


@dataclasses.dataclass(frozen=True)
class Shards:
    """Shards of neighbouring layers of a Stack, taken a layer at a time.

    Attributes:
      own: (L, ...) each, of all layers.
      start: the first layer.
      stop: the layer after the last.
    """

    own: Parameters
    start: int
    stop: int

    def layer(self, index: Any) -> list[jax.Array]:
        """One layer's shards, on the device."""
        pairs = zip(layer_of(self.own.shards, index), self.own.places, strict=True)
        return [place.fetched(shard) for shard, place in pairs]

    # In a loop of one layer after the other, shards that wait in host memory are
    # fetched while the layer before runs. A turn is (index, fetched).

    def first(self, *, reverse: bool = False) -> tuple[jax.Array, list[jax.Array]]:
        """The first turn."""
        index = jnp.int32(self.stop - 1 if reverse else self.start)
        return index, self._fetch(index)

    def take(self, turn: tuple, *, reverse: bool = False) -> tuple[list, tuple]:
        """A turn's layer, and the next turn."""
        index, fetched = turn
        following = index + (-1 if reverse else 1)
        near = jnp.clip(following, self.start, self.stop - 1)
        arriving = fetched if self.stop - self.start == 1 else self._fetch(near)
        arrived = iter(fetched)
        shards = [
            next(arrived) if place.hosted else layer_of(shard, index)
            for shard, place in zip(self.own.shards, self.own.places, strict=True)
        ]
        return shards, (following, arriving)

    def _fetch(self, index: Any) -> list[jax.Array]:
        pairs = zip(self.own.shards, self.own.places, strict=True)
        layer = layer_of([shard for shard, place in pairs if place.hosted], index)
        return [jax.device_put(x, jax.memory.Space.Device) for x in layer]


def layer_of(stacked: Any, index: Any) -> Any:
    """One layer's part of a pytree of (L, ...) arrays."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(
            x, index, keepdims=False, allow_negative_indices=False
        ),
        stacked,
    )


def put_layer(stacked: Any, layer: Any, index: Any) -> Any:
    """A pytree of (L, ...) arrays with one layer replaced; None where there is none."""
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_index_in_dim(
            x, y, index, 0, allow_negative_indices=False
        ),
        stacked,
        layer,
    )
