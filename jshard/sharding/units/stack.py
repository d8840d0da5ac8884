"""A Stack: the algorithm of ``unit.py``, scanned over layers.

What happens to a layer's weight, from shard to gradient: ``forward`` gathers it, runs
the layer and drops it; ``segment_backward`` gathers it again, transposes the layer,
scatters the gradient and reduces it. Here one layer follows the other. With prefetch,
``prefetch.py`` takes the place of both, and runs each layer's collectives beside its
neighbours' computation.

Neighbouring layers with the same remat policy share a loop: a segment. XLA inlines a
loop of one iteration, so that a single layer is scheduled like a Unit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.collectives.gather import gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.mesh import on_gpus
from jshard.sharding.settings.policy import Offload, UnitPolicy
from jshard.sharding.settings.scopes import LAYERS
from jshard.sharding.units import layers
from jshard.sharding.units import prefetch as prefetched
from jshard.sharding.units.linearize import (
    Gradients,
    Inputs,
    Layer,
    TracedLayer,
    floats_of,
    select,
    trace_layer,
)
from jshard.sharding.units.unit import barrier, gather_again, reduce, scatter
from jshard.system.errors import UserError


def make_scan(
    fn: Callable[[list, list, Any, list], Any],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Any,
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    *,
    beside: tuple[Sequence[jax.Array], Sequence[Placement]] = ((), ()),
) -> Callable[[], tuple[Any, Any, list[jax.Array]]]:
    """Prepares the scan of ``fn(weights, xs, carry, args)`` over layers.

    ``fn`` is one layer as a function of full weights, which returns ((carry, aux),
    changed, static), see ``trace_layer``. ``shards`` are this device's, of the layers'
    parameters, and ``xs`` the layers' other arrays, (L, ...) each; all layers share
    ``args``. ``beside`` has shards and placements of the unit after the Stack: they are
    gathered, and their gradients scattered, beside the last layer.

    Returns a function that runs the layers and returns the last carry, stacked (aux,
    changed, static), and the full weights of ``beside``.
    """
    next_shards, next_places = list(beside[0]), list(beside[1])
    stacked = Inputs(list(shards), list(xs), carry, list(args))
    traced = trace_layer(fn, stacked, places, stacked=True)
    program, ((out, _), *_) = traced.program, traced.outputs
    check_carry(carry, out)
    length = next(x.shape[0] for x in [*shards, *xs])
    prefetch, runs = prefetches(policy, places, length), layers.spans(policy, length)
    segments = segments_of(traced, places, policy, runs, prefetch)
    passes = forward, segment_backward
    if prefetch:
        passes = prefetched.forward, prefetched.segment_backward

    run = jax.custom_vjp(functools.partial(passes[0], next_places, False))
    run.defvjp(
        functools.partial(passes[0], next_places, True),
        functools.partial(_backward, passes[1], next_places),
    )
    stacked = stacked._replace(args=[*args, *program.consts])
    return functools.partial(run, stacked, segments, next_shards)


@jax.named_scope(LAYERS)
def forward(
    next_places: list[Placement],
    keep: bool,
    stacked: Inputs,
    segments: list[layers.Segment],
    next_shards: list[jax.Array],
) -> Any:
    """Returns (carry, ys, weights of the next unit); if ``keep``, for the backward."""
    carry, all_ys, saved = stacked.carry, [], []
    places = segments[0].layer.places
    for segment in layers.loops(segments, keep):
        run = functools.partial(layers.run_layer, segment.layer, stacked, keep)

        def body(state, _, run=run, straight=segment.straight):
            index, carry = state
            shards = layers.layer_of(stacked.weights, index)
            if straight:  # otherwise the loop holds the gather back
                shards, carry = barrier(shards, carry)
            carry, out = run(index, gather(shards, places), carry)
            return (index + 1, carry), out

        state, unroll = (jnp.int32(segment.start), carry), segment.unroll
        (_, carry), (ys, needed) = lax.scan(
            body, state, None, length=segment.length, unroll=unroll
        )
        all_ys.append(ys)
        saved.append(needed)
    next_shards, carry = barrier(next_shards, carry)
    outputs = carry, layers.join_layers(all_ys), gather(next_shards, next_places)
    return (outputs, (stacked, segments, next_shards, saved)) if keep else outputs


@jax.named_scope(LAYERS)
def _backward(
    segment_backward: Callable,
    next_places: list[Placement],
    saved: tuple[Inputs, list[layers.Segment], list[Any], Any],
    cotangents: Any,
) -> tuple[Inputs, None, list[Any]]:
    """Returns gradients of the inputs of a forward, given what that saved."""
    stacked, segments, next_shards, (*of_segments,) = saved
    carry_ct, (aux_ct, *others), next_grads = cotangents
    layer = segments[0].layer
    (carry_ct, aux_ct), *others = floats_of(
        ((carry_ct, aux_ct), *others), layer.outputs
    )
    sums = layer.no_gradients(stacked, carry_ct)
    next_grads = select(next_grads, [place.gradient.trainable for place in next_places])
    parts = scatter(next_grads, next_places)
    ys_ct = aux_ct, *others
    for segment in reversed(segments):
        needed = of_segments.pop(), ys_ct
        sums, parts = segment_backward(segment, stacked, needed, sums, parts)
    return Inputs(*sums), None, reduce(parts, next_places, next_shards)


def segment_backward(
    segment: layers.Segment,
    stacked: Inputs,
    needed: tuple[Any, Any],
    sums: Gradients,
    parts: list[Any],
) -> tuple[Gradients, list[Any]]:
    """Adds the gradients of a segment to ``sums``, the last layer first.

    ``needed`` is what the forward saved of it, and the cotangents of the stacked ys of
    all layers. ``parts`` are scattered gradients of the unit after the Stack, which is
    done before the layers.
    """
    layer, (saved, ys_ct) = segment.layer, needed
    places, wait = layer.places, bool(layer.reshard) and segment.straight
    parts, sums = layers.before_carry(parts, sums)

    def body(state, slices):
        index, sums = state
        (residuals, source), ys_ct = slices
        if source is None:
            shards = layers.layer_of(stacked.weights, index)
            source = select(shards, layer.needed_in_backward)
        if wait:
            source, sums = layers.before_carry(source, sums)
        weights = gather_again(source, layer)
        needed = residuals, ys_ct
        sums, grads = layers.transpose(layer, stacked, index, weights, needed, sums)
        grads = reduce(scatter(grads, places), places, stacked.weights)
        return (index - 1, layers.add_weights(sums, grads, index)), None

    slices = saved, jax.tree.map(lambda ct: ct[segment.start : segment.stop], ys_ct)
    state, unroll = (jnp.int32(segment.stop - 1), sums), segment.unroll
    (_, sums), _ = lax.scan(
        body, state, slices, length=segment.length, reverse=True, unroll=unroll
    )
    return sums, parts


def prefetches(policy: UnitPolicy, places: Sequence[Placement], length: int) -> bool:
    """Returns whether collectives run beside neighbouring layers, if there are any.

    With ``defer_scatter``, weights are gathered once per step, so layers need none.
    """
    communicates = any(
        place.shards() > 1
        or place.sharding.hosted
        or (place.gradient.trainable and place.gradient.sum_at == "unit")
        for place in places
    )
    wanted = on_gpus() if policy.prefetch is None else policy.prefetch
    return wanted and communicates and length > 1


def segments_of(
    traced: TracedLayer,
    places: Sequence[Placement],
    policy: UnitPolicy,
    runs: Sequence[tuple[int, int]],
    prefetch: bool,
) -> list[layers.Segment]:
    """Returns segments of these ``runs`` of layers."""
    segments = []
    for start, stop in runs:
        if policy.first_k is not None and start >= policy.first_k:
            policy = dataclasses.replace(policy, remat="none")
        # XLA moves arrays between host and device in loops; unrolled, it would keep
        # all of them on the device.
        hosted = isinstance(policy.remat, Offload)
        hosted |= any(place.sharding.hosted for place in places)
        unroll = policy.unroll and not hosted
        straight = unroll or stop - start == 1
        layer = outside = Layer(traced, places, policy, straight=straight)
        if prefetch and not straight:
            outside = Layer(traced, places, policy, straight=True)
        segments.append(layers.Segment(start, stop, layer, outside, unroll))
    return segments


def check_carry(carry: Any, outputs: Any) -> None:
    """Raises UserError unless a layer returns the shapes and dtypes it is given."""
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(outputs), strict=True)
    for before, after in pairs:
        if before.shape != after.shape or before.dtype != after.dtype:
            raise UserError(
                f"a stacked layer turns {before.dtype}{list(before.shape)} into "
                f"{after.dtype}{list(after.shape)}; equal layers must keep shape and "
                "dtype, so cast the stack's input or the layer's output"
            )


def split_aux(result: Any, carry: Any) -> tuple[Any, Any, bool]:
    """Splits a layer's result into (carry, aux, whether there is aux)."""
    same = jax.tree.structure(carry)
    if jax.tree.structure(result) == same:
        return result, None, False
    if isinstance(result, tuple) and len(result) == 2:
        if jax.tree.structure(result[0]) == same:
            return result[0], result[1], True
    raise UserError(
        "a stacked layer must return its first argument's tree, or a pair of that and "
        f"aux; got {jax.tree.structure(result)} for {same}"
    )
