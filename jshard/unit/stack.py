"""A Stack: the algorithm of ``unit.py``, scanned over layers.

Here one layer follows the other. With prefetch, ``pipeline.py`` overlaps each layer's
collectives with its neighbours' computation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives.reduce import all_reduce_in_unit, scatter
from jshard.errors import UserError
from jshard.fsdp.mesh import on_gpus
from jshard.fsdp.policy import UnitPolicy
from jshard.fsdp.precision import is_float
from jshard.fsdp.scopes import LAYERS
from jshard.unit import pipeline
from jshard.unit.float8 import in_float8
from jshard.unit.linearize import Inputs, differentiable, trace_layer
from jshard.unit.parameters import Parameters, abstract, scales, unshard
from jshard.unit.partition import select
from jshard.unit.segments import (
    Layers,
    Segment,
    StackArrays,
    Sums,
    communicates,
    layer_of,
    make_segments,
)
from jshard.unit.unit import barrier, map_present, unshard_after


def make_scan(
    fn: Callable[[list, list, Any, list], tuple[Any, Any]],
    own: Parameters,
    xs: Sequence[jax.Array],
    carry: Any,
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    following: Parameters,
) -> Callable[[], tuple[Any, Any, list[jax.Array]]]:
    """Prepares the scan of ``fn(weights, xs, carry, args) -> (carry, ys)`` over layers.

    Args:
      fn: one layer as a function of full weights; carry and ys are pytrees.
      own: the layers' parameters.
      xs: the other arrays of the layers, (L, ...) each.
      carry: the input of the first layer.
      args: what all layers share.
      policy: remat, reshard and prefetch.
      following: parameters of the unit after the Stack, gathered during the last layer.

    Returns:
      A function that runs the layers and returns the last carry, the stacked ys, and
      the full weights of ``following``.

    Raises:
      UserError: a layer changes the carry's shapes or dtypes.
    """
    inputs = Inputs(
        own.weight_types(layer=True),
        abstract(list(xs), layer=True),
        abstract(carry),
        abstract(list(args)),
    )
    traced = trace_layer(fn, inputs, own.places)
    check_carry(carry, traced.outputs[0])
    own, traced = in_float8(own, traced, stacked=True)
    length = next(x.shape[0] for x in [*own.shards, *xs])
    prefetch = on_gpus() if policy.prefetch is None else policy.prefetch
    prefetch = prefetch and communicates(own)
    segments = list(make_segments(traced, own, policy, length, prefetch))
    passes = _Passes(segments, own, following)
    run = jax.custom_vjp(passes.evaluate)
    run.defvjp(passes.forward, passes.backward)
    shards, next_shards = list(own.shards), list(following.shards)
    consts = [segment.consts() for segment in segments]
    args = [*args, *traced.consts]
    return functools.partial(run, shards, list(xs), carry, args, consts, next_shards)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward and the backward of a Stack, as rules of a ``custom_vjp``.

    Only the placements and types in ``own`` and ``following`` are read.
    """

    segments: Sequence[Segment]
    own: Parameters
    following: Parameters

    @jax.named_scope(LAYERS)
    def evaluate(self, shards, xs, carry, args, consts, next_shards):
        """Returns the outputs where nothing is differentiated."""
        traced, length = self.segments[0].in_loop.layer.traced, self.segments[-1].stop
        arrays = self._arrays(shards, xs, args)

        def run(index, weights, carry):
            return traced(Inputs(weights, layer_of(xs, index), carry, args))

        bounds, unroll = (0, length), self.segments[0].unroll
        if any(segment.prefetch for segment in self.segments):
            following = Parameters(next_shards, self.following.places)
            carry, ys, last_ys, (_, weights) = pipeline.forward(
                run, run, arrays, bounds, carry, following, unroll=unroll
            )
            ys = jax.tree.map(
                lambda y, last: jnp.concatenate([y, last[None]]), ys, last_ys
            )
        else:
            carry, ys = _scan_forward(run, arrays, bounds, carry, unroll=unroll)
            weights, carry = unshard_after(carry, next_shards, self.following.places)
        return carry, ys, weights

    @jax.named_scope(LAYERS)
    def forward(self, shards, xs, carry, args, consts, next_shards):
        """Returns the outputs, and what the backward needs."""
        ys, saved, weights = [], [], []
        arrays = self._arrays(shards, xs, args)
        for segment, own_consts in zip(self.segments, consts, strict=True):
            layers = Layers(segment, arrays, own_consts)
            run = functools.partial(layers.forward, segment.in_loop)
            bounds = (segment.start, segment.stop)
            if segment.prefetch:
                last = segment is self.segments[-1]
                following = Parameters(next_shards, self.following.places)
                carry, most, (last_ys, last_saved), (read, weights) = pipeline.forward(
                    run,
                    functools.partial(layers.forward, segment.peeled),
                    arrays,
                    bounds,
                    carry,
                    following if last else Parameters(),
                    unroll=segment.unroll,
                )
                ys += [most[0], jax.tree.map(lambda y: y[None], last_ys)]
                # The backward begins with the last layer, whose weights are here.
                read = select(read, segment.in_loop.layer.reads)
                saved.append((most[1], last_saved, read))
            else:
                carry, (some_ys, some_saved) = _scan_forward(
                    run, arrays, bounds, carry, unroll=segment.unroll
                )
                ys.append(some_ys)
                saved.append(some_saved)
        if not self.segments[-1].prefetch:
            weights, carry = unshard_after(carry, next_shards, self.following.places)
        ys = jax.tree.map(lambda *parts: jnp.concatenate(parts), *ys)
        return (carry, ys, weights), (shards, xs, args, consts, saved)

    @jax.named_scope(LAYERS)
    def backward(self, residuals, cotangents):
        """Returns gradients of the inputs."""
        shards, xs, args, consts, saved = residuals
        arrays = self._arrays(shards, xs, args)
        outputs = self.segments[0].in_loop.layer.traced.outputs
        carry_ct, ys_ct = differentiable(tuple(cotangents[:2]), outputs)
        trained = self.following.trained
        next_grads = select(cotangents[2], trained) if cotangents[2] else []
        parts = map_present(scatter, next_grads, self.following.places)
        if not self.segments[-1].prefetch:
            parts, carry_ct = barrier(parts, carry_ct)
        sums = Sums(
            carry_ct,
            _zeros(args, map(is_float, args)),
            _zeros(shards, self.own.trained),
            _zeros(xs, map(is_float, xs)),
        )
        for segment, own_consts, own_saved in reversed(
            list(zip(self.segments, consts, saved, strict=True))
        ):
            layers = Layers(segment, arrays, own_consts)
            if segment is self.segments[-1] and segment.prefetch:
                sums, parts = pipeline.backward(layers, own_saved, ys_ct, sums, parts)
            elif segment.prefetch:
                sums, _ = pipeline.backward(layers, own_saved, ys_ct, sums, [])
            else:
                sums = _scan_backward(layers, own_saved, ys_ct, sums)
        dtypes = [shard.dtype for shard in self.following.shards]
        places = self.following.places
        parts = map_present(all_reduce_in_unit, parts, places, dtypes)
        return sums.shards, sums.xs, sums.carry, sums.args, None, parts

    def _arrays(self, shards, xs, args):
        return StackArrays(Parameters(shards, self.own.places), xs, args)


def _scan_forward(run, arrays, bounds, carry, *, unroll):
    """Scans ``run(index, weights, carry)`` over layers, in order."""
    start, stop = bounds
    wait = unroll or stop - start == 1  # otherwise the loop holds the gather back

    def body(state, _):
        cursor, carry = state
        shards, following = arrays.take(cursor, bounds, 1)
        if wait:
            shards, carry = barrier(shards, carry)
        places = arrays.own.places
        weights = unshard(shards, places, scales(shards, places))
        carry, out = run(cursor[0], weights, carry)
        return (following, carry), out

    state = (arrays.cursor(start), carry)
    (_, carry), out = lax.scan(body, state, None, length=stop - start, unroll=unroll)
    return carry, out


def _scan_backward(layers, saved, ys_ct, sums):
    """Scans the backward over a segment's layers, in reverse."""
    segment, arrays, unit = layers.segment, layers.arrays, layers.segment.in_loop
    bounds = (segment.start, segment.stop)
    straight = segment.unroll or segment.length == 1
    wait = straight and bool(unit.reshard_after_forward)

    def body(state, slices):
        cursor, sums = state
        (residuals, kept), ys_ct = slices
        shards, following = arrays.take(cursor, bounds, -1)
        weights, carry_ct = unit.unshard_again(kept, shards, sums.carry, wait=wait)
        sums = sums._replace(carry=carry_ct)
        index = cursor[0]
        sums, grads = layers.transpose(unit, index, weights, residuals, ys_ct, sums)
        return (following, layers.finish(index, unit.scatter(grads), sums)), None

    ys_ct = jax.tree.map(lambda ct: ct[slice(*bounds)], ys_ct)
    state = (arrays.cursor(segment.stop - 1), sums)
    (_, sums), _ = lax.scan(
        body,
        state,
        (saved, ys_ct),
        length=segment.length,
        reverse=True,
        unroll=segment.unroll,
    )
    return sums


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


def _zeros(arrays: Sequence[jax.Array], wanted: Iterable[bool]) -> list[Any]:
    pairs = zip(arrays, wanted, strict=True)
    return [jnp.zeros_like(x) if w else None for x, w in pairs]
