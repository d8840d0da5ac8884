"""Runs a step's micro-batches through the stages: a scan over the schedule's ticks.

In each tick a device does what the schedule says of its stage, and then passes on what
it has made: activations to the next stage, their gradients to the one before. All else
stays in the stage. A branch has collectives, but only among the devices of one stage,
which all take it. What is outside of the Stack runs with the first stage's forward (all
before the layers) and with the last one's backward (the loss, both its passes).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.compat.jaxprs import without_dead_code
from jshard.errors import UserError
from jshard.fsdp.accumulate import Micro, first_of
from jshard.fsdp.mesh import PIPE, manual_axes
from jshard.fsdp.precision import is_float
from jshard.fsdp.scopes import SCHEDULE
from jshard.fsdp.state import ModelArrays
from jshard.fsdp.terms import seeds
from jshard.nn.dropout import merge_state
from jshard.nn.loss import Loss, Mean
from jshard.pipe.call import Split, split_program
from jshard.pipe.schedule import one_forward_one_backward
from jshard.unit.layers import layer_of, put_layer
from jshard.unit.linearize import Inputs, differentiable
from jshard.unit.partition import merge, select


class Held(NamedTuple):
    """What a device holds between ticks.

    Attributes:
      inputs: activations that wait for the stage's forward, (waiting, ...) each.
      output: those that its latest forward made.
      residuals: what its backwards need, (activations, ...) each.
      cotangents: gradients that wait for its backward, (waiting, ...) each.
      carry_ct: the gradient of what its latest backward has reached.
      args_ct: those of what all layers share, of the layers so far.
      grads: sums of the parameters' gradients.
      means: sums of the loss's terms, and of the named Means.
    """

    inputs: Any
    output: Any
    residuals: Any
    cotangents: Any
    carry_ct: Any
    args_ct: list[jax.Array]
    grads: list[jax.Array]
    means: tuple[list[Mean], dict[str, Mean]]


def pipelined(
    traced: core.ClosedJaxpr,
    shapes: Any,
    arrays: ModelArrays,
    micro: Micro,
    dtypes: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Loss, dict[str, Mean], nnx.State]:
    """Does what ``accumulate`` does, with the Stack's layers in stages.

    Args:
      traced: ``run(params, frozen, state, batch, index)`` of a micro-batch, traced.
      shapes: its abstract results: the loss, the named Means, the weights of terms that
        the step computes, and the next state.
      arrays: as one device of a stage has them.
      micro: the stage's micro-batches.
      dtypes: those in which gradients are added up.
      scale: scales the loss in the backward; None is 1.

    Raises:
      UserError: counts or state depend on the layers; or as ``split_program``.
    """
    params, structure = jax.tree.flatten(arrays.params)
    split = split_program(traced, len(params))
    states, weights, counts, after = _without_layers(split, shapes, arrays, micro)
    terms = zip(weights, (mean for _, mean in shapes[0].terms), strict=True)
    stage = _Stage(
        split,
        shapes,
        params,
        jax.tree.leaves(arrays.frozen),
        seeds(Loss(tuple(terms)), counts, scale),
    )
    grads, (means, metrics) = stage.scan((states, *micro), jax.tree.leaves(dtypes))
    # Only the last stage has them.
    means, metrics = jax.tree.map(lambda x: lax.psum(x, PIPE), (means, metrics))
    loss = Loss(tuple(zip(weights, means, strict=True)))
    return jax.tree.unflatten(structure, grads), loss, metrics, after


def _without_layers(
    split: Split, shapes: Any, arrays: ModelArrays, micro: Micro
) -> tuple[nnx.State, list, list, nnx.State]:
    """Runs what needs no layers, which is the same in each stage.

    Returns the state before each micro-batch; the weights of the loss's terms, and
    their global counts; and the state after the step.
    """
    loss, _, _, after = jax.tree.unflatten(
        jax.tree.structure(shapes), range(len(split.of_layers))
    )
    of_terms = [weight for weight, _ in loss.terms], [m.count for _, m in loss.terms]
    wanted = jax.tree.leaves((of_terms, after))
    if any(split.of_layers[i] for i in wanted):
        raise UserError(
            "mesh: pipe: a count or weight of the loss, or the next state of a module "
            "(nnx.BatchNorm, say), is computed from what the Stack returns, and must "
            "be known before; compute it from the batch, or leave pipe out of the mesh"
        )
    carry = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(split.call.carry)]
    last = len(micro[1]) - 1
    run = without_dead_code(lambda *inputs: _pick(split.after(*inputs, *carry), wanted))

    def one(state, slices):
        inputs = jax.tree.leaves((*arrays[:2], state, *slices))
        found = jax.tree.unflatten(jax.tree.structure((of_terms, after)), run(*inputs))
        _, index = slices
        return merge_state(state, found[1], last=index == last), (state, *found[0])

    after, (states, weights, counts) = lax.scan(one, arrays.model_state, micro)
    counts = [lax.psum(jnp.sum(count, axis=0), manual_axes()) for count in counts]
    return states, [weight[0] for weight in weights], counts, after


class _Stage:
    """What a device of a stage does with a micro-batch.

    Inputs of the split programs are the leaves of parameters, frozen ones, state, batch
    and index; operands are numbered as the call has them.
    """

    def __init__(
        self,
        split: Split,
        shapes: Any,
        params: Sequence[jax.Array],
        frozen: Sequence[jax.Array],
        seeds: Sequence[jax.Array],
    ):
        self.call, self.split, self.seeds = split.call, split, seeds
        self.params, self.arrays = list(params), (list(params), list(frozen))
        self.index, self.last = lax.axis_index(PIPE), lax.axis_size(PIPE) - 1
        self.shapes, numbers = shapes[:2], range(len(split.operands))
        self.numbers, _ = jax.tree.unflatten(self.call.structure, numbers)
        first = jax.tree.leaves(self.numbers.carry)
        self.others = [i for i in numbers if i not in first]
        # Those of what the layers share that parameters outside of the Stack lead to.
        args = jax.tree.leaves(self.numbers.args)
        self.args = [i for i in args if split.moves[i] and is_float(split.types[i])]
        self.outside = [i for i in range(len(params)) if i not in split.operands]

        def of(wanted: Sequence[int]) -> Callable[..., list[jax.Array]]:
            return without_dead_code(lambda *x: _pick(split.before(*x), wanted))

        results = range(len(jax.tree.leaves(self.shapes)))
        self.to_first, self.to_others, self.to_args = map(
            of, (first, self.others, self.args)
        )
        self.to_loss = without_dead_code(lambda *x: _pick(split.after(*x), results))

    def scan(self, micro: Any, dtypes: Sequence[Any]) -> tuple[list[jax.Array], Any]:
        """Runs all micro-batches; returns sums of gradients, and of Means.

        ``micro`` are the state, the examples and the index of each, and ``dtypes``
        those in which gradients are added up.
        """
        parts, (number,) = len(self.call.segments), micro[-1].shape
        plan = one_forward_one_backward(self.last + 1, number, parts)
        branches = [
            lambda held, inputs, slot: held,
            self._forward,
            *(functools.partial(self._backward, part) for part in range(parts)),
        ]
        scope = SCHEDULE.format(number, len(plan.does))
        rows = jnp.asarray(plan.rows(parts))  # (ticks, 4, stages)
        ahead = [(i, i + 1) for i in range(self.last)]
        back = [(i + 1, i) for i in range(self.last)]

        def send(tree: Any, way: list[tuple[int, int]]) -> Any:
            return jax.tree.map(lambda x: lax.ppermute(x, PIPE, way), tree)

        def tick(held: Held, row: jax.Array) -> tuple[Held, None]:
            # Otherwise XLA could gather weights once, ahead of the loop, and keep them.
            fixed, row = lax.optimization_barrier((self.arrays, row))
            does, i, arriving, returning = row[:, self.index]
            inputs = fixed, layer_of(micro, i)
            with jax.named_scope(scope):
                held = lax.switch(does, branches, held, inputs, i)
            arrived = send(held.output, ahead), send(held.carry_ct, back)
            return held._replace(
                inputs=_put(held.inputs, arrived[0], arriving),
                cotangents=_put(held.cotangents, arrived[1], returning),
            ), None

        held, _ = lax.scan(tick, self._empty(micro, plan, dtypes), rows)
        return held.grads, held.means

    def _empty(self, micro: Any, plan: Any, dtypes: Sequence[Any]) -> Held:
        """Returns what a device holds before the first tick."""

        def zeros(tree: Any, *number: int) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((*number, *x.shape), x.dtype), tree)

        carry, inputs = self.call.carry, (self.arrays, first_of(micro))
        run = lambda inputs, carry: self.call.forward(*self._operands(inputs, carry))
        _, residuals = jax.eval_shape(run, inputs, zeros(carry))
        loss, metrics = self.shapes
        return Held(
            zeros(carry, plan.waiting),
            zeros(carry),
            zeros(residuals, plan.activations),
            zeros(differentiable(carry, carry), plan.waiting),
            zeros(differentiable(carry, carry)),
            zeros([self.split.types[i] for i in self.args]),
            [jnp.zeros(x.shape, d) for x, d in zip(self.params, dtypes, strict=True)],
            zeros(([mean for _, mean in loss.terms], metrics)),
        )

    def _leaves(self, inputs: Any, outside: Sequence[Any] | None = None) -> list[Any]:
        """Returns the inputs of the split programs, maybe with other parameters."""
        (params, fixed), micro = inputs
        params = list(params)
        for i, x in zip(self.outside, outside or [], strict=outside is not None):
            params[i] = x
        return [*params, *fixed, *jax.tree.leaves(micro)]

    def _operands(self, inputs: Any, carry: Any) -> tuple[Inputs, list]:
        """Returns the operands of the call, with this input of the stage."""
        numbers = [*self.others, *jax.tree.leaves(self.numbers.carry)]
        values = [*self.to_others(*self._leaves(inputs)), *jax.tree.leaves(carry)]
        found = dict(zip(numbers, values, strict=True))
        leaves = [found[i] for i in range(len(numbers))]
        return jax.tree.unflatten(self.call.structure, leaves)

    def _forward(self, held: Held, inputs: Any, micro: jax.Array) -> Held:
        like = jax.tree.structure(self.call.carry)
        carry = lax.cond(
            self.index == 0,
            lambda: jax.tree.unflatten(like, self.to_first(*self._leaves(inputs))),
            lambda: _take(held.inputs, micro),
        )
        output, needed = self.call.forward(*self._operands(inputs, carry))
        return held._replace(
            output=output, residuals=_put(held.residuals, needed, micro)
        )

    def _backward(self, part: int, held: Held, inputs: Any, micro: jax.Array) -> Held:
        if part == 0:
            held = lax.cond(
                self.index == self.last,
                lambda: self._loss(held, inputs),
                lambda: held._replace(carry_ct=_take(held.cotangents, micro)),
            )
        segment = len(self.call.segments) - 1 - part
        stacked, consts = self._operands(inputs, held.output)
        needed = _take(held.residuals, micro)
        found = self.call.backward(segment, stacked, consts, needed, held.carry_ct)
        grads, (start, stop, *_) = list(held.grads), self.call.segments[segment]
        for number, grad in zip(
            jax.tree.leaves(self.numbers[:2]),
            jax.tree.leaves(found[:2], is_leaf=lambda x: x is None),
            strict=True,
        ):
            i = self.split.operands[number]
            if grad is not None and i is not None and i < len(grads):
                grads[i] = grads[i].at[start:stop].add(grad.astype(grads[i].dtype))
        of_args = dict(zip(self.numbers.args, found.args, strict=True))
        args_ct = [x + of_args[i] for i, x in zip(self.args, held.args_ct, strict=True)]
        held = held._replace(grads=grads, carry_ct=found.carry, args_ct=args_ct)
        if segment:
            return held
        moves = [is_float(x) for x in jax.tree.leaves(self.call.carry)]
        to_first = lambda *x: itertools.compress(self.to_first(*x), moves)
        carry_ct = jax.tree.leaves(held.carry_ct)
        held = lax.cond(
            self.index == 0,
            lambda: self._add(held, inputs, to_first, carry_ct),
            lambda: held,
        )
        if not self.args:
            return held
        held = self._add(held, inputs, self.to_args, held.args_ct)
        return held._replace(args_ct=list(map(jnp.zeros_like, held.args_ct)))

    def _loss(self, held: Held, inputs: Any) -> Held:
        """Runs what follows the layers, and its backward."""
        moves = jax.tree.map(is_float, self.call.carry)
        fixed = select(held.output, jax.tree.map(lambda x: not x, moves))

        def run(outside, moving):
            carry = jax.tree.leaves(merge(moving, fixed))
            found = self.to_loss(*self._leaves(inputs, outside), *carry)
            loss, metrics = jax.tree.unflatten(jax.tree.structure(self.shapes), found)
            means = [mean for _, mean in loss.terms]
            return [mean.total for mean in means], (means, metrics)

        outside = [self.params[i] for i in self.outside]
        moving = select(held.output, moves)
        _, pullback, means = jax.vjp(run, outside, moving, has_aux=True)
        grads, carry_ct = pullback(self.seeds)
        means = jax.tree.map(lambda s, x: s + x.astype(s.dtype), held.means, means)
        held = held._replace(carry_ct=carry_ct, means=means)
        return held._replace(grads=self._with(held.grads, grads))

    def _add(self, held: Held, inputs: Any, fn: Callable, cotangents: list) -> Held:
        """Runs the backward of ``fn(*inputs)``, for parameters outside of the Stack."""
        run = lambda outside: list(fn(*self._leaves(inputs, outside)))
        _, pullback = jax.vjp(run, [self.params[i] for i in self.outside])
        (grads,) = pullback(cotangents)
        return held._replace(grads=self._with(held.grads, grads))

    def _with(self, sums: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
        """Returns sums of gradients, with those outside of the Stack added."""
        sums = list(sums)
        for i, grad in zip(self.outside, grads, strict=True):
            sums[i] += grad.astype(sums[i].dtype)
        return sums


def _pick(values: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    return [values[i] for i in wanted]


def _take(slots: Any, micro: jax.Array) -> Any:
    """Returns what a micro-batch has left in its slot, of (slots, ...) each."""
    return jax.tree.map(lambda x: layer_of(x, micro % len(x)), slots)


def _put(slots: Any, values: Any, micro: jax.Array) -> Any:
    """Returns slots with the values of a micro-batch; as they are if it is -1."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        slot = jnp.maximum(micro, 0) % len(x)
        return put_layer(x, jnp.where(micro < 0, layer_of(x, slot), new), slot)

    return jax.tree.map(put, slots, values)
