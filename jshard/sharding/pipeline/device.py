"""What one device does with micro-batches in its stage: a scan over ticks.

In each tick a device does what the schedule says of its stage, and then passes on what
it has made: activations to the next stage, their gradients to the one before. All else
stays there. A branch has collectives, but only among the devices of one place along
"pipe", which all take it. What is outside of the Stack runs with the first stage's
forward (all before the layers) and with the last one's backward (the loss, both its
passes).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.layout.microbatches import first_of
from jshard.sharding.pipeline.call import SplitProgram
from jshard.sharding.pipeline.schedule import (
    FORWARD,
    NONE,
    Schedule,
    one_forward_one_backward,
)
from jshard.sharding.settings.loss import Mean
from jshard.sharding.settings.maximum import Max, before_all, combined
from jshard.sharding.settings.mesh import PIPE
from jshard.sharding.settings.precision import is_float
from jshard.sharding.settings.scopes import FIRST_STAGE, LAST_STAGE, SCHEDULE
from jshard.sharding.units.layers import Segment, layer_of, put_layer
from jshard.sharding.units.linearize import Inputs, floats_of, merge
from jshard.system.compat.jaxprs import without_dead_code


class Held(NamedTuple):
    """What a device holds between ticks, beside what its backwards need.

    Attributes:
      inputs: activations that wait for the stage's forward, (waiting, ...) each.
      output: those that its latest forward made.
      cotangents: gradients that wait for its backward, (waiting, ...) each.
      carry_ct: the gradient of what its latest backward has reached.
      args_ct: those of what all layers share, of the layers so far.
      grads: sums of gradients of the Stack's parameters, by their number.
      outside: those of all others.
      means: totals of the loss's terms, and sums of the named Means.
    """

    inputs: Any
    output: Any
    cotangents: Any
    carry_ct: Any
    args_ct: list[jax.Array]
    grads: dict[int, jax.Array]
    outside: list[jax.Array]
    means: tuple[list[jax.Array], dict[str, Mean | Max]]


class Now(NamedTuple):
    """With what a device does something in a tick, scalars as ``Schedule`` has them."""

    micro: jax.Array
    chunk: jax.Array
    takes: jax.Array
    keeps: jax.Array
    is_first: jax.Array  # whether the stage is the first one
    is_last: jax.Array


class Stage:
    """What a device of a pipeline does with a micro-batch, in one of its stages.

    Inputs of the split programs are the leaves of parameters, frozen ones, state, batch
    and index; operands are numbered as the call has them.
    """

    def __init__(
        self,
        split: SplitProgram,
        shapes: Any,
        params: Sequence[jax.Array],
        frozen: Sequence[jax.Array],
        seeds: Sequence[jax.Array],
    ):
        self.call, self.split, self.seeds = split.call, split, seeds
        self.params, self.arrays = list(params), (list(params), list(frozen))
        self.index, self.devices = lax.axis_index(PIPE), lax.axis_size(PIPE)
        self.shapes, numbers = shapes[:2], range(len(split.operands))
        self.numbers, _ = jax.tree.unflatten(self.call.structure, numbers)
        first = jax.tree.leaves(self.numbers.carry)
        self.others = [i for i in numbers if i not in first]
        # Those of what the layers share that parameters outside of the Stack lead to.
        args = jax.tree.leaves(self.numbers.args)
        types, trained = split.types, split.of_parameters
        self.args = [i for i in args if trained[i] and is_float(types[i])]
        self.outside = [i for i in range(len(params)) if i not in split.operands]

        def of(wanted: Sequence[int]) -> Callable[..., list[jax.Array]]:
            return without_dead_code(lambda *x: pick(split.before(*x), wanted))

        results = range(len(jax.tree.leaves(self.shapes)))
        self.to_first, self.to_others, self.to_args = map(
            of, (first, self.others, self.args)
        )
        self.to_loss = without_dead_code(lambda *x: pick(split.after(*x), results))

    def scan(self, micro: Any, dtypes: Sequence[Any]) -> tuple[list[jax.Array], Any]:
        """Runs all micro-batches; returns sums of gradients, and ``Held.means``.

        ``micro`` are the state, the examples and the index of each, and ``dtypes``
        those in which gradients are added up.
        """
        parts, (number,) = len(self.call.segments), micro[-1].shape
        chunks = self.call.chunks
        plan = one_forward_one_backward(self.devices, number, parts, chunks)
        held, residuals = self._empty(micro, plan, dtypes)

        def none() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), residuals)

        def backward(part: int, *state: Any) -> tuple[Held, Any]:
            return self._backward(part, *state), none()

        branches = [
            lambda held, *_: (held, none()),
            self._forward,
            *(functools.partial(backward, part) for part in range(parts)),
        ]
        scope = SCHEDULE.format(number, chunks, len(plan.does))
        rows = jnp.asarray(plan.rows())  # (ticks, 7, devices)
        neighbours = range(self.devices if chunks > 1 else self.devices - 1)
        ahead = [(i, (i + 1) % self.devices) for i in neighbours]
        back = [(to, i) for i, to in ahead]

        def send(tree: Any, way: list[tuple[int, int]]) -> Any:
            return jax.tree.map(lambda x: lax.ppermute(x, PIPE, way), tree)

        def tick(state: tuple[Held, Any], row: jax.Array) -> tuple[Any, None]:
            held, residuals = state
            # Otherwise XLA could gather weights once, ahead of the loop, and keep them.
            fixed, row = lax.optimization_barrier((self.arrays, row))
            does, index, chunk, takes, keeps, arriving, returning = row[:, self.index]
            stage, last = chunk * self.devices + self.index, chunks * self.devices - 1
            now = Now(index, chunk, takes, keeps, stage == 0, stage == last)
            inputs = fixed, layer_of(micro, now.micro)
            with jax.named_scope(scope):
                held, needed = lax.switch(does, branches, held, inputs, now, residuals)
            # Not in the branch: XLA would copy what all branches return.
            kept = _put(residuals, needed, jnp.where(does == FORWARD, now.keeps, NONE))
            arrived = send(held.output, ahead), send(held.carry_ct, back)
            held = held._replace(
                inputs=_put(held.inputs, arrived[0], arriving),
                cotangents=_put(held.cotangents, arrived[1], returning),
            )
            return (held, kept), None

        (held, _), _ = lax.scan(tick, (held, residuals), rows)
        found = held.grads | dict(zip(self.outside, held.outside, strict=True))
        return [found[i] for i in range(len(self.params))], held.means

    def _empty(
        self, micro: Any, plan: Schedule, dtypes: Sequence[Any]
    ) -> tuple[Held, Any]:
        """Returns what a device holds before the first tick.

        Apart is what backwards need, (activations, ...) each.
        """

        def zeros(tree: Any, *number: int) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((*number, *x.shape), x.dtype), tree)

        carry, inputs = self.call.carry, (self.arrays, first_of(micro))
        run = lambda *state: self.call.forward(*self._operands(*state))
        _, residuals = jax.eval_shape(run, inputs, zeros(carry), 0)
        loss, metrics = self.shapes
        sums = [jnp.zeros(x.shape, d) for x, d in zip(self.params, dtypes, strict=True)]
        held = Held(
            zeros(carry, plan.waiting),
            zeros(carry),
            zeros(floats_of(carry, carry), plan.waiting),
            zeros(floats_of(carry, carry)),
            zeros([self.split.types[i] for i in self.args]),
            {i: x for i, x in enumerate(sums) if i not in self.outside},
            [sums[i] for i in self.outside],
            before_all(([mean.total for _, mean in loss.terms], metrics)),
        )
        return held, zeros(residuals, plan.activations)

    def _leaves(self, inputs: Any, outside: Sequence[Any] | None = None) -> list[Any]:
        """Returns the inputs of the split programs, maybe with other parameters."""
        (params, fixed), micro = inputs
        params = list(params)
        for i, x in zip(self.outside, outside or [], strict=outside is not None):
            params[i] = x
        return [*params, *fixed, *jax.tree.leaves(micro)]

    def _operands(
        self, inputs: Any, carry: Any, chunk: Any
    ) -> tuple[Inputs, list[Segment]]:
        """Returns the operands of a stage's call, with this input."""
        numbers = [*self.others, *jax.tree.leaves(self.numbers.carry)]
        values = [*self.to_others(*self._leaves(inputs)), *jax.tree.leaves(carry)]
        found = dict(zip(numbers, values, strict=True))
        leaves = [found[i] for i in range(len(numbers))]
        stacked, segments = jax.tree.unflatten(self.call.structure, leaves)
        return self.call.of_chunk(chunk, stacked), segments

    def _forward(self, held: Held, inputs: Any, now: Now, _: Any) -> tuple[Held, Any]:
        """Runs the stage's layers; also returns what their backward needs."""
        like = jax.tree.structure(self.call.carry)
        with jax.named_scope(FIRST_STAGE):
            carry = lax.cond(
                now.is_first,
                lambda: jax.tree.unflatten(like, self.to_first(*self._leaves(inputs))),
                lambda: _take(held.inputs, now.takes),
            )
        output, needed = self.call.forward(*self._operands(inputs, carry, now.chunk))
        return held._replace(output=output), needed

    def _backward(
        self, part: int, held: Held, inputs: Any, now: Now, residuals: Any
    ) -> Held:
        """Runs a part of their backward, which begins with the last layers."""
        # XLA would copy what a branch takes and returns unchanged.
        if part == 0:
            with jax.named_scope(LAST_STAGE):
                carry_ct, outside, means = lax.cond(
                    now.is_last,
                    lambda: self._loss(held, inputs),
                    lambda: (
                        _take(held.cotangents, now.takes),
                        held.outside,
                        held.means,
                    ),
                )
            held = held._replace(carry_ct=carry_ct, outside=outside, means=means)
        index = len(self.call.segments) - 1 - part
        stacked, segments = self._operands(inputs, held.output, now.chunk)
        needed = _take(residuals, now.keeps)[index]
        found = self.call.backward(segments[index], stacked, needed, held.carry_ct)
        grads = dict(held.grads)
        start = segments[index].start + now.chunk * self.call.rows
        for number, grad in zip(
            jax.tree.leaves(self.numbers[:2]),
            jax.tree.leaves(found[:2], is_leaf=lambda x: x is None),
            strict=True,
        ):
            i = self.split.operands[number]
            if grad is not None and i in grads:
                rows = lax.dynamic_slice_in_dim(grads[i], start, len(grad))
                rows += grad.astype(rows.dtype)
                grads[i] = lax.dynamic_update_slice_in_dim(grads[i], rows, start, 0)
        of_args = dict(zip(self.numbers.args, found.args, strict=True))
        args_ct = [x + of_args[i] for i, x in zip(self.args, held.args_ct, strict=True)]
        held = held._replace(grads=grads, carry_ct=found.carry, args_ct=args_ct)
        if index:
            return held
        floats = [is_float(x) for x in jax.tree.leaves(self.call.carry)]
        to_first = lambda *x: itertools.compress(self.to_first(*x), floats)
        carry_ct = jax.tree.leaves(held.carry_ct)
        with jax.named_scope(FIRST_STAGE):
            outside = lax.cond(
                now.is_first,
                lambda: self._pull(to_first, held.outside, inputs, carry_ct),
                lambda: held.outside,
            )
        if self.args:
            outside = self._pull(self.to_args, outside, inputs, held.args_ct)
        args_ct = list(map(jnp.zeros_like, held.args_ct))
        return held._replace(outside=outside, args_ct=args_ct)

    def _loss(self, held: Held, inputs: Any) -> tuple[Any, list, Any]:
        """Runs what follows the layers, and its backward.

        Returns the gradient of their output, and sums: of gradients of parameters
        outside of the Stack, and of Means.
        """
        floats = floats_of(held.output, self.call.carry)

        def run(outside, floats):
            carry = jax.tree.leaves(merge(floats, held.output))
            found = self.to_loss(*self._leaves(inputs, outside), *carry)
            found = list(map(jnp.asarray, found))  # some may be numbers
            loss, metrics = jax.tree.unflatten(jax.tree.structure(self.shapes), found)
            totals = [mean.total for _, mean in loss.terms]
            return totals, (totals, metrics)

        outside = [self.params[i] for i in self.outside]
        _, pullback, means = jax.vjp(run, outside, floats, has_aux=True)
        grads, carry_ct = pullback(self.seeds)
        add = lambda s, x: s + x.astype(s.dtype)
        means = combined(add, Max.larger, held.means, means)
        return carry_ct, _add(held.outside, grads), means

    def _pull(self, fn: Callable, sums: list, inputs: Any, cotangents: list) -> list:
        """Adds to ``sums`` the gradients by way of ``fn(*inputs)``."""
        run = lambda outside: list(fn(*self._leaves(inputs, outside)))
        _, pullback = jax.vjp(run, [self.params[i] for i in self.outside])
        (grads,) = pullback(cotangents)
        return _add(sums, grads)


def _add(sums: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    return [s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)]


def pick(values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Returns some of a list's values."""
    return [values[i] for i in wanted]


def _take(slots: Any, slot: jax.Array) -> Any:
    """Returns what is in a slot, of (slots, ...) each; if there is none, of any."""
    return layer_of(slots, jnp.maximum(slot, 0))


def _put(slots: Any, values: Any, slot: jax.Array) -> Any:
    """Returns slots with these values in one; as they are if it is ``NONE``."""
    some = jnp.maximum(slot, 0)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return put_layer(x, jnp.where(slot < 0, layer_of(x, some), new), some)

    return jax.tree.map(put, slots, values)
