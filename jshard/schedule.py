"""The scanned forward and backward: when each gather and scatter happens.

Forward, a layer at a time: all_gather its weights, run it, drop them, keep the
residuals that ``remat`` allows. Backward, in reverse: all_gather the weights that the
gradient reads, rebuild what was not kept, transpose the layer, reduce_scatter its
gradients. Gradients, like parameters, exist as shards only.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives import (
    Placement,
    abstract_like,
    is_float,
    vary,
    varying,
    zeros_like,
)
from jshard.errors import UserError
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
    """Neighbouring layers of a Stack that are treated alike, in a loop of their own."""

    start: int
    stop: int
    layer: LinearizedLayer
    reshard: Reshard

    @property
    def single(self) -> bool:
        """XLA inlines a loop of one trip: its layer is then scheduled like a Unit."""
        return self.stop - self.start == 1

    def scan(
        self,
        body: Callable,
        shards: Sequence[jax.Array],
        places: Sequence[Placement],
        carry: Any,
        xs: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """``lax.scan`` of ``body(index, here, carry, slices)`` over these layers.

        ``here`` are a layer's shards, on the device: those that wait in host memory are
        fetched while the layer before runs.
        """
        hosted = [place.hosted for place in places]

        def fetch(index: jax.Array) -> list[Any]:
            layer = _layer([x for x, h in zip(shards, hosted, strict=True) if h], index)
            return [jax.device_put(x, jax.memory.Space.Device) for x in layer]

        def step(state, slices):
            index, fetched, carry = state
            following = index + (-1 if reverse else 1)
            near = jnp.clip(following, self.start, self.stop - 1)
            arriving = fetched if self.single else fetch(near)
            arrived = iter(fetched)
            here = [
                next(arrived) if h else _layer([x], index)[0]
                for x, h in zip(shards, hosted, strict=True)
            ]
            carry, ys = body(index, here, carry, slices)
            return (following, arriving, carry), ys

        first = jnp.int32(self.stop - 1 if reverse else self.start)
        state = (first, fetch(first), carry)
        length = self.stop - self.start
        (_, _, carry), ys = lax.scan(step, state, xs, length=length, reverse=reverse)
        return carry, ys


def _segments(
    policy: UnitPolicy, length: int, linearize: Callable[[Any, bool], LinearizedLayer]
) -> list[_Segment]:
    first = length if policy.first_k is None else min(policy.first_k, length)
    last = length - min(policy.keep_last, length)
    segments = []
    for start, stop in itertools.pairwise(sorted({0, first, last, length})):
        remat = policy.remat if start < first else "none"
        reshard = policy.reshard_after_forward if start < last else False
        layer = linearize(remat, stop - start == 1)
        segments.append(_Segment(start, stop, layer, reshard))
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
      policy: remat and reshard.
      moving_xs: which of ``xs`` have gradients.

    Returns:
      The last carry, and the layers' ys stacked.
    """
    shards, xs = list(shards), list(xs)
    carry, args = [vary(x) for x in carry], [vary(x) for x in args]
    length = next(x.shape[0] for x in [*shards, *xs])
    trained = [p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)]

    def linearize(remat: Any, single: bool) -> LinearizedLayer:
        return LinearizedLayer(
            fn,
            full([abstract_like(s, layer=True) for s in shards], places),
            [abstract_like(x, layer=True) for x in xs],
            [abstract_like(x) for x in carry],
            [abstract_like(x) for x in args],
            differentiable=[*trained, *moving_xs, *map(is_float, [*carry, *args])],
            remat=remat,
            prevent_cse=single,
        )

    segments = _segments(policy, length, linearize)
    first = segments[0].layer
    check_carry(carry, first.outputs)
    num_carry = len(carry)

    @jax.custom_vjp
    def run(shards, xs, carry, args):
        def body(index, here, carry, _):
            xs_here = _layer(xs, index)
            if length == 1:
                here, carry = hold(here, carry)
            outputs = first.call(gather_all(here, places), xs_here, carry, args)
            return _carry_like(outputs[:num_carry], carry), outputs[num_carry:]

        return _Segment(0, length, first, True).scan(body, shards, places, carry, None)

    def forward(shards, xs, carry, args):
        ys, saved = [], []
        for segment in segments:

            def body(index, here, carry, _, segment=segment):
                layer = segment.layer
                if segment.single:
                    here, carry = hold(here, carry)
                weights = gather_all(here, places)
                outputs, kept = layer.forward(weights, _layer(xs, index), carry, args)
                weights = keep(weights, places, layer.weights_read, segment.reshard)
                carry = _carry_like(outputs[:num_carry], carry)
                return carry, (outputs[num_carry:], (kept, weights))

            carry, (segment_ys, segment_saved) = segment.scan(
                body, shards, places, carry, None
            )
            ys.append(segment_ys)
            saved.append(segment_saved)
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
        sums = (carry_ct, args_ct, grads, xs_grads)
        for segment, kept in reversed(list(zip(segments, saved, strict=True))):

            def body(index, here, sums, slices, segment=segment):
                carry_ct, args_ct, grads, xs_grads = sums
                (kept, weights), ys_ct = slices
                layer, reshard = segment.layer, segment.reshard
                needed = to_gather(weights, here, layer.weights_read)
                if segment.single and reshard:
                    needed, carry_ct = hold(needed, carry_ct)
                weights = gather_read(needed, places, layer.weights_read, reshard)
                layer_grads, layer_xs_grads, carry_grads, arg_grads = layer.backward(
                    weights, _layer(xs, index), args, kept, [*carry_ct, *ys_ct]
                )
                moved = [g for g, m in zip(arg_grads, moving_args, strict=True) if m]
                args_ct = [a + g for a, g in zip(args_ct, moved, strict=True)]
                carry_ct = [g for g in carry_grads if g is not None]
                grads = _put(grads, scatter(layer_grads, places, here), index)
                xs_grads = _put(xs_grads, layer_xs_grads, index)
                return (carry_ct, args_ct, grads, xs_grads), None

            part = [ct[segment.start : segment.stop] for ct in ys_ct]
            sums, _ = segment.scan(
                body, shards, places, sums, (kept, part), reverse=True
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


def _layer(stacked: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    """One layer's part of (L, ...) arrays."""
    return [
        lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)
        for x in stacked
    ]


def _zeros(stacked: Sequence[jax.Array], wanted: Sequence[bool]) -> list[Any]:
    return [zeros_like(x) if w else None for x, w in zip(stacked, wanted, strict=True)]


def _put(stacked: Sequence[Any], layer: Sequence[Any], index: jax.Array) -> list[Any]:
    """(L, ...) arrays with one layer replaced; None where there is none."""
    return [
        None
        if x is None
        else lax.dynamic_update_index_in_dim(
            x, y, index, 0, allow_negative_indices=False
        )
        for x, y in zip(stacked, layer, strict=True)
    ]


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _carry_like(outputs: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    return [vary(o, tuple(varying(c))) for o, c in zip(outputs, carry, strict=True)]


def _floats(cotangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    return [c for c, o in zip(cotangents, outputs, strict=True) if is_float(o)]
