"""A Stack's passes: the algorithm of ``unit.py``, scanned over layers.

Layers run one after another here, or with prefetch in the order that ``pipeline.py``
has for the same verbs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.comm.collectives import scatter, sum_copies
from jshard.comm.varying import abstract_like, is_float, vary, varying, zeros_like
from jshard.compat.jax_functions import inner
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.mesh import REPLICA, overlaps
from jshard.policy import UnitPolicy
from jshard.unit import pipeline
from jshard.unit.linearize import Inputs, differentiable, trace_layer
from jshard.unit.partition import select
from jshard.unit.segments import Segment, Shards, cut, layer_of, moves, put_layer
from jshard.unit.unit import (
    Parameters,
    ShardedLayer,
    barrier,
    map_present,
    unshard,
    whole,
)

# JAX's own: what is in these is typed already (loop_types.py).
scan: Callable[..., Any] = inner(lax.scan)
call_vjp: Callable[..., Any] = inner(jax.custom_vjp.__call__)


class Sums(NamedTuple):
    """What a backward pass adds up; None where there is no gradient.

    Attributes:
      carry: cotangents of a layer's carry.
      args: of what is the same for every layer.
      shards: gradients of the stacked shards.
      xs: of the other stacked arrays.
    """

    carry: Any
    args: Any
    shards: Any
    xs: Any


def make_scan(
    fn: Callable[[list, list, Any, list], tuple[Any, Any]],
    own: Parameters,
    xs: Sequence[jax.Array],
    carry: Any,
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    following: Parameters,
) -> tuple[Callable[..., Any], tuple]:
    """Prepares the scan of ``fn(weights, xs, carry, args) -> (carry, ys)`` over layers.

    Args:
      fn: one layer; its carry and ys are pytrees.
      own: the layers' parameters.
      xs: what else belongs to each layer, (L, ...) each.
      carry: enters the first layer.
      args: the same for every layer.
      policy: remat, reshard and prefetch.
      following: parameters of the unit that comes next, gathered during the last layer.

    Returns:
      ``run, inputs``: ``run(*inputs)`` gives the last carry, the layers' ys stacked,
      and the weights of ``following``.
    """
    carry, args = jax.tree.map(vary, carry), [vary(x) for x in args]
    inputs = Inputs(
        whole(own.types(layer=True), own.places),
        [abstract_like(x, layer=True) for x in xs],
        jax.tree.map(abstract_like, carry),
        list(map(abstract_like, args)),
    )
    traced = trace_layer(fn, inputs)
    check_carry(carry, traced.outputs[0])
    length = next(x.shape[0] for x in [*own.shards, *xs])
    prefetch = overlaps() if policy.prefetch is None else policy.prefetch
    segments = cut(traced, own, policy, length, prefetch and moves(own))
    passes = _Passes(segments, own, following)
    run = jax.custom_vjp(passes.evaluate)
    run.defvjp(passes.forward, passes.backward)
    shards, next_shards = list(own.shards), list(following.shards)
    consts = [segment.consts() for segment in segments]
    args = [*args, *traced.consts]
    inputs = (shards, list(xs), carry, args, consts, next_shards)
    return functools.partial(call_vjp, run), inputs


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Forward and backward of all layers."""

    segments: Sequence[Segment]
    own: Parameters
    following: Parameters

    def evaluate(self, shards, xs, carry, args, consts, next_shards):
        """Outputs alone."""
        traced, length = self.segments[0].unit.layer.traced, self.segments[-1].stop
        layers = self._shards(shards, 0, length)

        def body(state, _):
            turn, carry = state
            here, following = layers.take(turn)
            if length == 1:
                here, carry = barrier(here, carry)
            weights = unshard(here, self.own.places)
            out, ys = traced(Inputs(weights, layer_of(xs, turn[0]), carry, args))
            return (following, carry_like(out, carry)), ys

        state = (layers.first(), carry)
        (_, carry), ys = scan(body, state, None, length=length)
        weights, carry = unshard_following(next_shards, self.following.places, carry)
        return carry, ys, weights

    def forward(self, shards, xs, carry, args, consts, next_shards):
        """Outputs, and what the backward needs."""
        ys, saved, weights = [], [], []
        for segment, own_consts in zip(self.segments, consts, strict=True):
            layers = self._shards(shards, segment.start, segment.stop)
            inputs = _Given(segment, layers, xs, args, own_consts)
            if segment.prefetch:
                wanted = next_shards if segment is self.segments[-1] else []
                verbs = _Forward(inputs, self.following.places, wanted)
                carry, most, last, read = pipeline.forward(verbs, segment, carry)
                (some_ys, kept), ((last_ys, last_kept), weights) = most, last
                ys += [some_ys, jax.tree.map(lambda y: y[None], last_ys)]
                # The backward begins with the last layer, whose weights are there.
                read = select(read, segment.unit.layer.reads)
                saved.append((kept, last_kept, read))
            else:
                carry, (some_ys, kept) = self._forward_in_turn(inputs, carry)
                ys.append(some_ys)
                saved.append(kept)
        if not self.segments[-1].prefetch:
            weights, carry = unshard_following(
                next_shards, self.following.places, carry
            )
        ys = jax.tree.map(lambda *parts: _concatenate(parts), *ys)
        return (carry, ys, weights), (shards, xs, args, consts, saved)

    def _forward_in_turn(self, given, carry):
        segment, layers = given.segment, given.layers

        def body(state, _):
            turn, carry = state
            here, following = layers.take(turn)
            if segment.length == 1:
                here, carry = barrier(here, carry)
            weights = unshard(here, self.own.places)
            carry, out = given.forward(segment.unit, turn[0], weights, carry)
            return (following, carry), out

        state = (layers.first(), carry)
        (_, carry), out = scan(body, state, None, length=segment.length)
        return carry, out

    def backward(self, residuals, cotangents):
        """Gradients of what the forward was given."""
        shards, xs, args, consts, saved = residuals
        outputs = self.segments[0].unit.layer.traced.outputs
        carry_ct, ys_ct = differentiable(tuple(cotangents[:2]), outputs)
        trained = self.following.trained
        next_grads = select(cotangents[2], trained) if cotangents[2] else []
        parts = map_present(scatter, next_grads, self.following.places)
        if not self.segments[-1].prefetch:
            parts, carry_ct = barrier(parts, carry_ct)
        sums = Sums(
            carry_ct,
            [zeros_like(a) if is_float(a) else None for a in args],
            _zeros(shards, self.own.trained),
            _zeros(xs, map(is_float, xs)),
        )
        for segment, own_consts, kept in reversed(
            list(zip(self.segments, consts, saved, strict=True))
        ):
            layers = self._shards(shards, segment.start, segment.stop)
            given = _Given(segment, layers, xs, args, own_consts)
            if segment.prefetch:
                last = segment is self.segments[-1]
                verbs = _Backward(given, kept[0], kept[1], ys_ct, parts if last else [])
                late = lax.axis_size(REPLICA) > 1
                sums, arrived = pipeline.backward(
                    verbs, segment, kept[2], sums, late=late
                )
                parts = arrived if last else parts
            else:
                sums = self._backward_in_turn(given, kept, ys_ct, sums)
        parts = map_present(sum_copies, parts, self.following.types())
        none = jax.tree.map(lambda _: None, consts)
        return sums.shards, sums.xs, sums.carry, sums.args, none, parts

    def _backward_in_turn(self, given, saved, ys_ct, sums):
        segment, layers = given.segment, given.layers
        unit = segment.unit

        def body(state, slices):
            turn, sums = state
            (residuals, kept), ys_ct = slices
            here, following = layers.take(turn, reverse=True)
            source = unit.source(kept, here)
            if segment.length == 1 and unit.reshard_after_forward:
                source, carry_ct = barrier(source, sums.carry)
                sums = sums._replace(carry=carry_ct)
            weights = unit.unshard_again(source)
            sums, grads = given.transpose(
                unit, turn[0], weights, residuals, ys_ct, sums
            )
            sums = given.put(turn[0], unit.reduce_scatter(grads), sums)
            return (following, sums), None

        ys_ct = jax.tree.map(lambda ct: ct[segment.start : segment.stop], ys_ct)
        state = (layers.first(reverse=True), sums)
        (_, sums), _ = scan(
            body, state, (saved, ys_ct), length=segment.length, reverse=True
        )
        return sums

    def _shards(self, shards, start, stop):
        return Shards(Parameters(shards, self.own.places), start, stop)


@dataclasses.dataclass(frozen=True)
class _Given:
    """A segment, and what its passes are given."""

    segment: Segment
    layers: Shards
    xs: Any
    args: Any
    consts: tuple[list, list]

    def inputs(self, unit: ShardedLayer, index, weights, carry) -> Inputs:
        in_loop, alone = self.consts
        consts = in_loop if unit is self.segment.unit else alone
        return Inputs(weights, layer_of(self.xs, index), carry, [*self.args, *consts])

    def forward(self, unit: ShardedLayer, index, weights, carry):
        """One layer: the carry after it, and (ys, what its backward is left)."""
        inputs = self.inputs(unit, index, weights, carry)
        (out, ys), kept = unit.forward(inputs)
        return carry_like(out, carry), (ys, kept)

    def transpose(self, unit: ShardedLayer, index, weights, residuals, ys_ct, sums):
        """One layer's backward: the sums after it, and gradients of whole weights."""
        inputs = self.inputs(unit, index, weights, [])
        cotangents = (sums.carry, ys_ct)
        grads = unit.layer.transpose(inputs, residuals, cotangents)
        added = grads.args[: len(self.args)]
        args = jax.tree.map(lambda a, g: a + g, sums.args, added)
        xs = put_layer(sums.xs, grads.xs, index)
        return Sums(grads.carry, args, sums.shards, xs), grads.weights

    def put(self, index, parts, sums):
        """The sums with the gradients of one layer's shards."""
        return sums._replace(shards=put_layer(sums.shards, parts, index))


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What ``pipeline.forward`` calls: see ``pipeline.Forward``."""

    given: _Given
    next_places: Sequence[Placement]
    next_shards: Sequence[jax.Array]

    def unshard(self, index, carry):
        layers = self.given.layers
        here, carry = barrier(layers.layer(index), carry)
        return unshard(here, list(layers.own.places)), carry

    def run(self, index, weights, carry):
        return self.given.forward(self.given.segment.unit, index, weights, carry)

    def run_last(self, index, weights, carry):
        following, carry = unshard_following(self.next_shards, self.next_places, carry)
        alone = self.given.segment.alone
        carry, out = self.given.forward(alone, index, weights, carry)
        return carry, (out, following)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """What ``pipeline.backward`` calls: see ``pipeline.Backward``.

    Attributes:
      given: the segment.
      stacked: (residuals, kept weights) of the layers but the last.
      last: those of the last layer.
      ys_ct: cotangents of the stacked outputs.
      arriving: gradients of the unit that follows, on their way since before.
    """

    given: _Given
    stacked: Any
    last: Any
    ys_ct: Any
    arriving: Sequence[Any]

    def _saved(self, index):
        segment = self.given.segment
        if isinstance(index, int) and index == segment.stop - 1:
            return self.last
        return layer_of(self.stacked, index - segment.start)

    def unshard_again(self, index, sums):
        unit, layers = self.given.segment.unit, self.given.layers
        _, kept = self._saved(index)
        here = layers.layer(index) if kept is None else []
        source = unit.source(kept, here)
        source, carry_ct = barrier(source, sums.carry)
        return unit.unshard_again(source), sums._replace(carry=carry_ct)

    def transpose(self, index, weights, sums):
        return self._transpose(self.given.segment.unit, index, weights, sums)

    def transpose_alone(self, index, weights, sums):
        return self._transpose(self.given.segment.alone, index, weights, sums)

    def transpose_last(self, index, weights, sums):
        sums, grads = self.transpose_alone(index, weights, sums)
        arrived, carry_ct = barrier(self.arriving, sums.carry)
        return sums._replace(carry=carry_ct), grads, arrived

    def _transpose(self, unit, index, weights, sums):
        residuals, _ = self._saved(index)
        ys_ct = layer_of(self.ys_ct, index)
        return self.given.transpose(unit, index, weights, residuals, ys_ct, sums)

    def scatter(self, grads, following, sums):
        parts, carry_ct = self.given.segment.unit.scatter(grads), sums.carry
        if following is not None:
            (parts, following), carry_ct = barrier((parts, following), carry_ct)
        return parts, following, sums._replace(carry=carry_ct)

    def put(self, index, parts, sums):
        return self.given.put(index, self.given.segment.unit.sum_copies(parts), sums)


def unshard_following(
    shards: Sequence[jax.Array], places: Sequence[Placement], carry: Any
) -> tuple[list[jax.Array], Any]:
    """The weights of the unit that comes next, not before ``carry``; and the carry."""
    if not shards:
        return [], carry
    here, carry = barrier(shards, carry)
    return unshard(here, list(places)), carry


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
    """(carry, aux, whether there is aux) of what a layer returns."""
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


def carry_like(outputs: Any, carry: Any) -> Any:
    """A layer's outputs with the mesh types of its inputs."""
    return jax.tree.map(lambda o, c: vary(o, sorted(varying(c))), outputs, carry)


def _zeros(stacked: Sequence[jax.Array], wanted: Iterable[bool]) -> list[Any]:
    return [zeros_like(x) if w else None for x, w in zip(stacked, wanted, strict=True)]


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
