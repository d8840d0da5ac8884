"""A Stack's call in a pipelined step: it is left open, for the schedule to run.

The step's program is traced with the model as its user wrote it. There a primitive
takes the place of the Stack's layers, which says what they take and give. The program
before it makes the input of the first stage, and what follows turns the output of the
last one into the loss (``split_program``); between the two, the schedule runs the
layers of each stage with the verbs of a Stack.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jshard.compat.jaxprs import (
    environment,
    evaluate,
    find,
    has,
    line_of,
    placeholder,
    without_dead_code,
)
from jshard.errors import UserError
from jshard.fsdp.mesh import PIPE, on_gpus
from jshard.fsdp.policy import UnitPolicy
from jshard.fsdp.scopes import LAYERS as LAYERS_SCOPE
from jshard.layout.placement import Placement
from jshard.pipe.schedule import parts_of
from jshard.pipe.stages import Stages
from jshard.unit import pipeline, stack
from jshard.unit.dataflow import dependencies, union
from jshard.unit.layers import How, Segment, put_layer
from jshard.unit.linearize import Inputs, abstract, select, trace_layer
from jshard.unit.unit import gather, weight_types

NO_YS = (None, [], ())  # of a layer: aux, changes, and what is static of these


@dataclasses.dataclass(frozen=True, eq=False)  # a parameter of a primitive has a hash
class Call:
    """A stage's layers, as verbs.

    Layers pass on their output, and with it the aux of all layers, (L, ...): each fills
    in its own row.

    Attributes:
      segments: the layers whose backward takes a tick each, the last in the end.
      rows: of a stage, of those of all stages of a device.
      chunks: the stages of a device.
      how: placements, and whether weights are gathered again.
      prefetch: whether a layer's collectives run beside its neighbours.
      carry: what one layer passes to the next, abstract.
      structure: of the operands: (Inputs of all layers, constants of the segments).
    """

    segments: list[Segment]
    rows: int
    chunks: int
    how: How
    prefetch: bool
    carry: Any
    structure: Any

    def of_chunk(self, chunk: Any, stacked: Inputs) -> Inputs:
        """Returns the inputs of a stage's layers, of those of a device."""

        def rows(x: jax.Array) -> jax.Array:
            if x.shape[0] == self.rows:
                return x
            return lax.dynamic_slice_in_dim(x, chunk * self.rows, self.rows)

        weights, xs = jax.tree.map(rows, (stacked.weights, stacked.xs))
        return stacked._replace(weights=weights, xs=xs)

    def forward(self, stacked: Inputs, consts: list) -> tuple[Any, Any]:
        """Returns the carry after the last layer, and what the backward needs."""
        run = pipeline.forward if self.prefetch else stack.forward
        (carry, *_), saved = run(self.segments, self.how, [], True, stacked, consts, [])
        if self.prefetch:  # a layer's full weights, of each micro-batch, would be kept
            return carry, [(*needed, None) for *needed, _ in saved[3]]
        return carry, saved[3]

    @jax.named_scope(LAYERS_SCOPE)
    def backward(
        self, part: int, stacked: Inputs, consts: list, needed: Any, carry_ct: Any
    ) -> Inputs:
        """Returns the gradients of a segment, those of its own rows."""
        start, stop, layer, outside, unroll = self.segments[part]
        run = pipeline if self.prefetch else stack
        rows = jax.tree.map(lambda x: x[start:stop], (stacked.weights, stacked.xs))
        stacked = stacked._replace(weights=rows[0], xs=rows[1])
        moves = layer.moves._replace(carry=None)
        sums = jax.tree.map(jnp.zeros_like, select(stacked._replace(carry=None), moves))
        grads, _ = run.segment_backward(
            (0, stop - start, layer, outside, unroll),
            consts[part],
            self.how,
            stacked,
            (needed[part], NO_YS),
            sums._replace(carry=carry_ct),
            [],
        )
        return grads


def _results(layer: core.ClosedJaxpr, call: Call) -> list[Any]:
    return [x.update(weak_type=False) for x in jax.tree.leaves(call.carry)]


def _refuse(*_: Any, **params: Any) -> Any:
    raise UserError(
        "mesh: pipe: a transform (jax.grad, jax.vmap, another Unit) is around the call "
        "of the Stack, whose layers run in stages; call the Stack outside of it"
    )


LAYERS = placeholder("layers_of_a_pipeline", _results, _refuse)


def leave_open(
    fn: Callable[[list, list, Any, list], Any],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Any,
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    stages: Stages,
    *,
    beside: tuple[Sequence[jax.Array], Sequence[Placement]] = ((), ()),
) -> Callable[[], tuple[Any, Any, list[jax.Array]]]:
    """Does what ``make_scan`` does, but leaves the layers to the schedule.

    ``shards``, and those of units inside the layers, are a stage's; other ``xs``, the
    layers' state, are those of all layers, (L, ...).

    Raises:
      UserError: the layers return much aux, or change their state by what they compute.
    """
    shards, places, xs = list(shards), list(places), list(xs)
    used = jnp.asarray(stages.used())[lax.axis_index(PIPE)]
    rows = jnp.asarray(stages.rows())[lax.axis_index(PIPE)]
    of_stage = [x[rows] if x.shape[0] == stages.layers else x for x in xs]
    of_stage += [used, rows]

    def outputs(weights, xs, carry, args):
        *xs, used, row = xs
        before, of_layers = carry
        (after, aux), *_ = fn(weights, xs, before, args)
        stack.check_carry(before, after)
        passed_on = after, put_layer(of_layers, aux, row)
        if all(count == stages.longest for count in stages.counts()):
            return (passed_on, None), [], ()
        kept = jax.tree.map(
            lambda new, old: jnp.where(used, new, old), passed_on, carry
        )
        return (kept, None), [], ()

    of_layer, of_xs = abstract((shards, of_stage), layer=True)
    weights, shared = abstract((weight_types(of_layer, places), [*args]))
    changes = _changes(fn, weights, xs, carry, args, stages)
    carry = carry, _no_aux(fn, weights, xs, carry, args, stages)
    first = abstract(carry)
    traced = trace_layer(outputs, Inputs(weights, of_xs, first, shared), places)
    _, program, ((after, _), *_) = traced
    prefetch = on_gpus() if policy.prefetch is None else policy.prefetch
    prefetch = prefetch and stages.longest > 1
    segments = list(
        stack.segments_of(traced, places, policy, _parts(policy, stages), prefetch)
    )
    consts = [(layer.consts, outside.consts) for _, _, layer, outside, _ in segments]
    stacked = Inputs(shards, of_stage, carry, [*args, *program.consts])
    operands, structure = jax.tree.flatten((stacked, consts))
    sizes = stages.longest, stages.per_device
    how = places, True  # weights are no residuals, not of each micro-batch
    call = Call(segments, *sizes, how, prefetch, after, structure)

    def run() -> tuple[Any, Any, list[jax.Array]]:
        found = LAYERS.bind(*operands, layer=program, call=call)
        after, aux = jax.tree.unflatten(jax.tree.structure(carry), found)
        return after, (aux, *changes), gather(list(beside[0]), list(beside[1]))

    return run


def _parts(policy: UnitPolicy, stages: Stages) -> list[tuple[int, int]]:
    """Returns (start, stop) of the layers whose backward takes as long as a forward."""
    number = parts_of(policy.remat, stages.longest)
    ends = [round(i * stages.longest / number) for i in range(number + 1)]
    return list(itertools.pairwise(ends))


def _no_aux(
    fn: Callable, weights: Any, xs: list, carry: Any, args: Any, stages: Stages
) -> Any:
    """Returns zeros for the aux of all layers, (L, ...).

    Raises:
      UserError: it is larger than the output of a layer, with which it is sent.
    """
    inputs = Inputs(weights, abstract(xs, layer=True), *abstract((carry, list(args))))
    (_, aux), *_ = jax.eval_shape(fn, *inputs)
    aux = jax.tree.map(lambda x: jnp.zeros((stages.layers, *x.shape), x.dtype), aux)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (aux, carry)]
    if sizes[0] > sizes[1]:
        raise UserError(
            f"mesh: pipe: the aux of all layers of {stages.name!r} crosses stages with "
            f"each micro-batch, and has {sizes[0]:,} values beside the {sizes[1]:,} of "
            "a layer's output; return less (a sum), or leave pipe out of the mesh"
        )
    return aux


def _changes(
    fn: Callable, weights: Any, xs: list, carry: Any, args: Any, stages: Stages
) -> Any:
    """Returns the stacked changes of the layers' state, which depend on it alone."""
    of_xs = abstract(xs, layer=True)
    inputs = Inputs(weights, of_xs, *abstract((carry, list(args))))
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    _, *changes = shapes
    count = len(jax.tree.leaves(shapes)) - len(jax.tree.leaves(changes))
    if not jax.tree.leaves(changes):
        return changes
    state = [x.shape[0] == stages.layers for x in xs]  # else shards of inner units
    bits = Inputs(1, [int(not whole) for whole in state], 1, 1)
    needs = jax.tree.leaves(
        jax.tree.map(lambda b, x: [b] * len(jax.tree.leaves(x)), bits, inputs)
    )
    if union(dependencies(program.jaxpr, needs)[count:]):
        raise UserError(
            f"mesh: pipe: a layer of {stages.name!r} changes its state by what it "
            "computes (nnx.BatchNorm, say), micro-batch by micro-batch; use a layer "
            "without such state, or leave pipe out of the mesh"
        )
    other = [None if whole else x for x, whole in zip(of_xs, state, strict=True)]
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), inputs._replace(xs=other)
    )

    def of_state(*own: Any) -> list[Any]:
        values = iter(own)
        xs = [next(values) if x is None else x for x in zeros.xs]
        return jax.tree.leaves(fn(*zeros._replace(xs=xs))[1])

    run, own = without_dead_code(of_state), list(itertools.compress(xs, state))
    _, ys = lax.scan(lambda _, own: (None, run(*own)), None, own)
    return jax.tree.unflatten(jax.tree.structure(changes), ys)


class Split(NamedTuple):
    """A step's program, before and after the layers of its Stack.

    Attributes:
      call: the layers.
      before: ``before(*inputs)`` returns the operands of the call.
      after: ``after(*inputs, *carry)`` returns the program's results.
      types: of the operands.
      operands: the index of the input that each operand is, or None.
      of_layers: which results depend on the layers.
      moves: which operands depend on the first inputs, the parameters.
    """

    call: Call
    before: Callable[..., list[Any]]
    after: Callable[..., list[Any]]
    types: list[Any]
    operands: list[int | None]
    of_layers: list[bool]
    moves: list[bool]


def split_program(traced: core.ClosedJaxpr, parameters: int) -> Split:
    """Splits a traced program at the one call of its Stack.

    Raises:
      UserError: the Stack is called in a loop, a branch or a transform, not once, or
        the program calls back to Python outside of the layers.
    """
    jaxpr, number = traced.jaxpr, len(traced.jaxpr.invars)
    within = [i for i, eqn in enumerate(jaxpr.eqns) if has(eqn, {LAYERS.name})]
    (index, *others) = within or [None]
    if index is None or others or jaxpr.eqns[index].primitive is not LAYERS:
        raise UserError(
            "mesh: pipe: a step must call its Stack once, outside of loops, branches "
            "and transforms (jax.checkpoint, nnx.jit, another Unit)"
        )
    eqn = jaxpr.eqns[index]
    outside = [other for other in jaxpr.eqns if other is not eqn]
    if call := find(outside, {"debug_callback", "debug_print", "io_callback"}):
        raise UserError(
            f"mesh: pipe: {line_of(call)}: loss_fn prints or calls back outside of the "
            "Stack's layers; leave that out, or leave pipe out of the mesh"
        )

    def before(*inputs: Any) -> list[Any]:
        env = environment(traced, inputs)
        return evaluate(jaxpr.eqns[:index], env, eqn.invars)

    def after(*inputs: Any) -> list[Any]:
        env = environment(traced, inputs[:number])
        env.update(zip(eqn.outvars, inputs[number:], strict=True))
        return evaluate(outside, env, jaxpr.outvars)

    def rule(found: Any, entering: list[int]) -> list[int] | None:
        return [1] * len(eqn.outvars) if found is eqn else None

    depends = dependencies(jaxpr, [0] * number, rule)
    bits = [int(i < parameters) for i in range(number)]
    of_operands = jaxpr.replace(eqns=jaxpr.eqns[:index], outvars=eqn.invars)
    place = {var: i for i, var in enumerate(jaxpr.invars)}
    return Split(
        eqn.params["call"],
        before,
        after,
        [x.aval for x in eqn.invars],
        [None if isinstance(x, core.Literal) else place.get(x) for x in eqn.invars],
        list(map(bool, depends)),
        list(map(bool, dependencies(of_operands, bits))),
    )
