"""One layer of a Stack's stacked arrays: its shards, its backward, its gradients."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.policy import UnitPolicy
from jshard.sharding.units.linearize import Gradients, Inputs, Layer
from jshard.sharding.units.unit import barrier, drop


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("layer", "outside"),
    meta_fields=("start", "stop", "unroll"),
)
@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring layers of a Stack with the same remat policy: they share a loop.

    Attributes:
      start: the first layer.
      stop: the layer after the last one.
      layer: a layer in the loop.
      outside: a layer outside of it, of which prefetch has some.
      unroll: whether the loop is unrolled.
    """

    start: int
    stop: int
    layer: Layer
    outside: Layer
    unroll: bool

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.stop - self.start

    @property
    def straight(self) -> bool:
        """Whether the layers follow each other without a loop."""
        return self.unroll or self.length == 1


def loops(segments: list[Segment], keep: bool) -> list[Segment]:
    """Returns the segments of a forward: one, if it keeps nothing for a backward."""
    as_one = dataclasses.replace(segments[0], start=0, stop=segments[-1].stop)
    return segments if keep else [as_one]


def spans(policy: UnitPolicy, length: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each run of layers with the same remat policy."""
    first = length if policy.first_k is None else min(policy.first_k, length)
    return list(itertools.pairwise(sorted({0, first, length})))


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


def shards_after(
    stacked: Inputs, places: Sequence[Placement], index: Any, after: Any
) -> tuple[list[jax.Array], Any]:
    """Returns one layer's shards, in device memory, that wait for ``after``.

    The barrier stands before the slices, so that XLA casts a shard while it slices it,
    and keeps no slice of the forward for the backward.
    """
    if any(place.sharding.hosted for place in places):
        pairs = zip(layer_of(stacked.weights, index), places, strict=True)
        return barrier([place.fetched(shard) for shard, place in pairs], after)
    shards, after = barrier(stacked.weights, after)
    return layer_of(shards, index), after


def run_layer(
    layer: Layer,
    stacked: Inputs,
    keep: bool,
    index: Any,
    weights: list[Any],
    carry: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """Runs a layer, drops its weights: (carry, (ys, (residuals, kept weights))).

    If ``keep`` is False, there is no backward, and nothing is kept for it.
    """
    inputs = Inputs(weights, layer_of(stacked.xs, index), carry, stacked.args)
    if not keep:
        (carry, aux), *others = layer.evaluate(inputs)
        return carry, ((aux, *others), None)
    ((carry, aux), *others), residuals = layer.forward(inputs)
    kept = drop(weights, layer)
    # Otherwise full weights could stay in memory until they are split.
    if layer.straight and kept is not None and layer.reshard is not False:
        kept, carry = barrier(kept, carry)
    return carry, ((aux, *others), (residuals, kept))


def transpose(
    layer: Layer,
    stacked: Inputs,
    index: Any,
    weights: list[Any],
    needed: tuple[Any, Any],
    sums: Gradients,
) -> tuple[Gradients, list[Any]]:
    """Returns ``sums`` with a layer's gradients, and those of its full weights apart.

    ``needed`` are the layer's residuals, and the cotangents of its ys. ``sums`` are the
    gradients of all inputs so far.
    """
    inputs = Inputs(weights, layer_of(stacked.xs, index), [], stacked.args)
    residuals, (aux_ct, *others) = needed
    cotangents = ((sums.carry, aux_ct), *others)
    grads = layer.transpose(inputs, residuals, cotangents)
    args = jax.tree.map(lambda a, g: a + g, sums.args, grads.args)
    xs = put_layer(sums.xs, grads.xs, index)
    return sums._replace(carry=grads.carry, args=args, xs=xs), grads.weights


def before_carry(tree: Any, sums: Gradients) -> tuple[Any, Gradients]:
    """Returns both; the backward of the layer below starts after ``tree``."""
    tree, carry_ct = barrier(tree, sums.carry)
    return tree, sums._replace(carry=carry_ct)


def add_weights(sums: Gradients, grads: Sequence[Any], index: Any) -> Gradients:
    """Adds a layer's gradients, one shard of each, to the sums."""
    return sums._replace(weights=put_layer(sums.weights, grads, index))


def join_layers(all_ys: Sequence[Any]) -> Any:
    """Returns the stacked ys of all segments in one."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *all_ys)
