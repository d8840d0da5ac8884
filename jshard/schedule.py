"""The scanned forward and backward: when each gather and scatter happens.

Forward, a layer at a time: all_gather its weights, run it, drop them, keep the
residuals that ``remat`` allows. Backward, in reverse: all_gather the weights that the
gradient reads, rebuild what was not kept, transpose the layer, reduce_scatter its
gradients. Gradients, like parameters, exist as shards only.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard.collectives import (
    Placement,
    abstract_like,
    is_float,
    vary,
    varying,
    zeros_like,
)
from jshard.errors import UserError
from jshard.layer_loops import Layers, layer_of, put_layer
from jshard.mesh import overlaps
from jshard.remat import LinearizedLayer
from jshard.unit_weights import (
    Reshard,
    UnitPolicy,
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


def run_unit(
    fn: Callable[[list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
) -> list[jax.Array]:
    """One gather, one call of ``fn(weights, xs, inputs)``, one scatter backward.

    Args:
      fn: the unit on flat lists of arrays; returns a flat list.
      shards: local shards of the unit's own parameters.
      places: their placements.
      xs: what else belongs to the unit (its state, shards of units inside it).
      inputs: the call's arguments.
      policy: remat and reshard.
      moving_xs: which of ``xs`` have gradients.
    """
    xs, inputs = list(xs), [vary(x) if is_float(x) else x for x in inputs]
    layer = LinearizedLayer(
        lambda weights, xs, carry, args: fn(weights, xs, carry),
        full([abstract_like(s) for s in shards], places),
        [abstract_like(x) for x in xs],
        [abstract_like(x) for x in inputs],
        [],
        differentiable=[
            *(p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)),
            *moving_xs,
            *map(is_float, inputs),
        ],
        remat=policy.remat,
        prevent_cse=True,
    )

    read, reshard = layer.weights_read, policy.reshard_after_forward

    @jax.custom_vjp
    def run(shards, xs, inputs, args):
        shards, inputs = hold(shards, inputs)
        return layer.call(gather_all(shards, places), xs, inputs, args)

    def forward(shards, xs, inputs, args):
        needed, inputs = hold(shards, inputs)
        weights = gather_all(needed, places)
        outputs, kept = layer.forward(weights, xs, inputs, args)
        weights = keep(weights, places, read, reshard)
        # Else whole weights could wait to be split into what groups keep.
        if weights is not None and reshard is not False:
            weights, outputs = hold(weights, outputs)
        return outputs, (shards, xs, args, kept, weights)

    def backward(saved, cotangents):
        shards, xs, args, kept, weights = saved
        cotangents = _floats(cotangents, layer.outputs)
        needed = to_gather(weights, shards, read)
        if reshard:
            needed, cotangents = hold(needed, cotangents)
        weights = gather_read(needed, places, read, reshard)
        grads, xs_grads, input_grads, arg_grads = layer.backward(
            weights, xs, args, kept, cotangents
        )
        return scatter(grads, places, shards), xs_grads, input_grads, arg_grads

    run.defvjp(forward, backward)
    return run(list(shards), xs, inputs, layer.consts)


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Neighbouring layers of a Stack that are treated alike, in loops of their own.

    XLA inlines a loop of one trip: a layer on its own is scheduled like a Unit.
    """

    start: int
    stop: int
    layer: LinearizedLayer  # in a loop
    alone: LinearizedLayer  # outside of one
    reshard: Reshard
    ahead: bool  # whether transfers run beside neighbouring layers


def _segments(policy: UnitPolicy, length: int, linearize: Callable) -> list[_Segment]:
    first = length if policy.first_k is None else min(policy.first_k, length)
    last = length - min(policy.keep_last, length)
    prefetch = overlaps() if policy.prefetch is None else policy.prefetch
    segments = []
    for start, stop in itertools.pairwise(sorted({0, first, last, length})):
        remat = policy.remat if start < first else "none"
        reshard = policy.reshard_after_forward if start < last else False
        alone = linearize(remat, prevent_cse=True)
        single = stop - start == 1
        layer = alone if single else linearize(remat, prevent_cse=False)
        ahead = prefetch and not single
        segments.append(_Segment(start, stop, layer, alone, reshard, ahead))
    return segments


def run_stack(
    fn: Callable[[list, list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Sequence[jax.Array],
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
) -> tuple[list[jax.Array], list[jax.Array]]:
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

    Returns:
      The last carry, and the layers' ys stacked.
    """
    shards, xs = list(shards), list(xs)
    carry, args = [vary(x) for x in carry], [vary(x) for x in args]
    length = next(x.shape[0] for x in [*shards, *xs])
    trained = [p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)]

    def linearize(remat: Any, *, prevent_cse: bool) -> LinearizedLayer:
        return LinearizedLayer(
            fn,
            full([abstract_like(s, layer=True) for s in shards], places),
            [abstract_like(x, layer=True) for x in xs],
            [abstract_like(x) for x in carry],
            [abstract_like(x) for x in args],
            differentiable=[*trained, *moving_xs, *map(is_float, [*carry, *args])],
            remat=remat,
            prevent_cse=prevent_cse,
        )

    segments = _segments(policy, length, linearize)
    first = segments[0].layer
    check_carry(carry, first.outputs)
    num_carry = len(carry)

    @jax.custom_vjp
    def run(shards, xs, carry, args):
        def body(index, here, carry, _):
            if length == 1:
                here, carry = hold(here, carry)
            weights = gather_all(here, places)
            outputs = first.call(weights, layer_of(xs, index), carry, args)
            return _carry_like(outputs[:num_carry], carry), outputs[num_carry:]

        return Layers(shards, places, 0, length).in_turn(body, carry, None)

    def forward(shards, xs, carry, args):
        ys, saved = [], []
        for segment in segments:
            layers = Layers(shards, places, segment.start, segment.stop)

            def step(layer, index, weights, carry, segment=segment):
                outputs, kept = layer.forward(weights, layer_of(xs, index), carry, args)
                weights = keep(weights, places, layer.weights_read, segment.reshard)
                carry = _carry_like(outputs[:num_carry], carry)
                return carry, (outputs[num_carry:], (kept, weights))

            def body(index, here, carry, _, segment=segment, step=step):
                if segment.stop - segment.start == 1:
                    here, carry = hold(here, carry)
                return step(segment.layer, index, gather_all(here, places), carry)

            if segment.ahead:

                def load(index, carry, layers=layers):
                    here, carry = hold(layers.here(index), carry)
                    return gather_all(here, places), carry

                carry, (some_ys, some), (last_ys, last), weights = layers.forward_ahead(
                    load,
                    functools.partial(step, segment.layer),
                    functools.partial(step, segment.alone),
                    carry,
                )
                ys += [some_ys, [y[None] for y in last_ys]]
                read = segment.layer.weights_read
                saved.append((some, last, [weights[i] for i in read]))
            else:
                carry, (some_ys, some) = layers.in_turn(body, carry, None)
                ys.append(some_ys)
                saved.append(some)
        ys = [_concatenate(parts) for parts in zip(*ys, strict=True)]
        return (carry, ys), (shards, xs, args, saved)

    def backward(residuals, cotangents):
        shards, xs, args, saved = residuals
        carry_ct = _floats(cotangents[0], first.outputs[:num_carry])
        ys_ct = _floats(cotangents[1], first.outputs[num_carry:])
        moving_args = [is_float(a) for a in args]
        args_ct = [zeros_like(a) for a in args if is_float(a)]
        grads = [
            zeros_like(x) if m else None for x, m in zip(shards, trained, strict=True)
        ]
        xs_grads = [
            zeros_like(x) if m else None for x, m in zip(xs, moving_xs, strict=True)
        ]
        shard_types = [abstract_like(s, layer=True) for s in shards]

        def step(layer, index, weights, kept, ys_ct, sums):
            """One layer's backward: the sums after it, and whole gradients."""
            carry_ct, args_ct, grads, xs_grads = sums
            layer_grads, layer_xs_grads, carry_grads, arg_grads = layer.backward(
                weights, layer_of(xs, index), args, kept, [*carry_ct, *ys_ct]
            )
            moved = [g for g, m in zip(arg_grads, moving_args, strict=True) if m]
            args_ct = [a + g for a, g in zip(args_ct, moved, strict=True)]
            carry_ct = [g for g in carry_grads if g is not None]
            xs_grads = put_layer(xs_grads, layer_xs_grads, index)
            return (carry_ct, args_ct, grads, xs_grads), layer_grads

        def finish(index, layer_grads, sums, following=None):
            """Scatters a layer's gradients into the stacks; what follows waits."""
            carry_ct, args_ct, grads, xs_grads = sums
            parts = scatter_shards(layer_grads, places)
            if following is not None:
                flat, tree = jax.tree.flatten((parts, following))
                flat, carry_ct = hold(flat, carry_ct)
                parts, following = jax.tree.unflatten(tree, flat)
            grads = put_layer(grads, sum_shards(parts, shard_types), index)
            return (carry_ct, args_ct, grads, xs_grads), following

        sums = (carry_ct, args_ct, grads, xs_grads)
        for segment, some in reversed(list(zip(segments, saved, strict=True))):
            layers = Layers(shards, places, segment.start, segment.stop)
            read, reshard = segment.layer.weights_read, segment.reshard

            def body(index, here, sums, slices, segment=segment):
                (kept, weights), ys_ct = slices
                read, reshard = segment.layer.weights_read, segment.reshard
                needed = to_gather(weights, here, read)
                if segment.stop - segment.start == 1 and reshard:
                    needed, carry_ct = hold(needed, sums[0])
                    sums = (carry_ct, *sums[1:])
                weights = gather_read(needed, places, read, reshard)
                sums, layer_grads = step(
                    segment.layer, index, weights, kept, ys_ct, sums
                )
                carry_ct, args_ct, grads, xs_grads = sums
                parts = scatter(layer_grads, places, here)
                return (
                    carry_ct,
                    args_ct,
                    put_layer(grads, parts, index),
                    xs_grads,
                ), None

            if not segment.ahead:
                part = [ct[segment.start : segment.stop] for ct in ys_ct]
                sums, _ = layers.in_turn(body, sums, (some, part), reverse=True)
                continue
            some, last, last_weights = some

            def kept_at(index, segment=segment, some=some, last=last):
                if isinstance(index, int) and index == segment.stop - 1:
                    return last
                here = index - segment.start
                leaves, tree = jax.tree.flatten(some)
                return jax.tree.unflatten(tree, layer_of(leaves, here))

            def load(
                index, sums, layers=layers, read=read, reshard=reshard, at=kept_at
            ):
                _, weights = at(index)
                here = layers.here(index) if weights is None else []
                needed = to_gather(weights, here, read)
                needed, carry_ct = hold(needed, sums[0])
                weights = gather_read(needed, places, read, reshard)
                return weights, (carry_ct, *sums[1:])

            def one(layer, index, weights, sums, at=kept_at):
                kept, _ = at(index)
                return step(layer, index, weights, kept, layer_of(ys_ct, index), sums)

            whole: list[Any] = [None] * len(places)
            for i, weight in zip(read, last_weights, strict=True):
                whole[i] = weight
            sums = layers.backward_ahead(
                load,
                functools.partial(one, segment.layer),
                functools.partial(one, segment.alone),
                finish,
                whole,
                sums,
            )
        carry_ct, args_ct, grads, xs_grads = sums
        moving = iter(carry_ct)
        carry_grads = [next(moving) if is_float(c) else None for c in carry]
        moving = iter(args_ct)
        arg_grads = [next(moving) if m else None for m in moving_args]
        return grads, xs_grads, carry_grads, arg_grads

    run.defvjp(forward, backward)
    return run(shards, xs, carry, [*args, *first.consts])


def split_aux(result: Any, carry: Any) -> tuple[Any, Any, bool]:
    """Takes a layer's result, ``carry`` or ``(carry, aux)``, apart."""
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


def check_carry(carry: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raises UserError unless a layer returns the shapes and dtypes it is given."""
    for before, after in zip(carry, outputs, strict=False):
        if before.shape != after.shape or before.dtype != after.dtype:
            raise UserError(
                f"a stacked layer turns {before.dtype}{list(before.shape)} into "
                f"{after.dtype}{list(after.shape)}; equal layers must keep shape and "
                "dtype, so cast the stack's input or the layer's output"
            )


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _carry_like(outputs: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    return [vary(o, tuple(varying(c))) for o, c in zip(outputs, carry, strict=True)]


def _floats(cotangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    return [c for c, o in zip(cotangents, outputs, strict=True) if is_float(o)]
