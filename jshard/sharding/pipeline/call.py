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

from jshard.sharding.collectives.gather import gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.pipeline.schedule import parts_of
from jshard.sharding.pipeline.stages import Stages
from jshard.sharding.settings.mesh import PIPE
from jshard.sharding.settings.policy import UnitPolicy
from jshard.sharding.settings.scopes import LAYERS as LAYERS_SCOPE
from jshard.sharding.units import prefetch as prefetched
from jshard.sharding.units import stack
from jshard.sharding.units.layers import Segment, put_layer
from jshard.sharding.units.linearize import Gradients, Inputs, TracedLayer, trace_layer
from jshard.system.compat import jaxprs
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies
from jshard.system.compat.programs.primitives import placeholder
from jshard.system.errors import UserError

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
      prefetch: whether a layer's collectives run beside its neighbours.
      carry: what one layer passes to the next, abstract.
      structure: of the operands: (Inputs of all layers, segments).
    """

    segments: list[Segment]
    rows: int
    chunks: int
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

    def forward(self, stacked: Inputs, segments: list[Segment]) -> tuple[Any, Any]:
        """Returns the carry after the last layer, and what the backward needs."""
        run = prefetched.forward if self.prefetch else stack.forward
        (carry, *_), saved = run([], True, stacked, segments, [])
        if self.prefetch:  # a layer's full weights, of each micro-batch, would be kept
            return carry, [(*needed, None) for *needed, _ in saved[3]]
        return carry, saved[3]

    @jax.named_scope(LAYERS_SCOPE)
    def backward(
        self, segment: Segment, stacked: Inputs, needed: Any, carry_ct: Any
    ) -> Gradients:
        """Returns the gradients of a segment, those of its own rows."""
        run = prefetched if self.prefetch else stack
        own = slice(segment.start, segment.stop)
        weights, xs = jax.tree.map(lambda x: x[own], (stacked.weights, stacked.xs))
        stacked = stacked._replace(weights=weights, xs=xs)
        sums = segment.layer.no_gradients(stacked, carry_ct)
        segment = dataclasses.replace(segment, start=0, stop=segment.length)
        needed = needed, NO_YS
        grads, _ = run.segment_backward(segment, stacked, needed, sums, [])
        return grads


def _refuse(*_: Any, **params: Any) -> Any:
    raise UserError(
        "mesh: pipe: a transform (jax.grad, jax.vmap, another Unit) is around the call "
        "of the Stack, whose layers run in stages; call the Stack outside of it"
    )


_results = lambda layer, call: [
    x.update(weak_type=False) for x in jax.tree.leaves(call.carry)
]
LAYERS = placeholder("layers_of_a_pipeline", _results, _refuse)


def leave_open(
    fn: Callable[[list, list, Any, list], Any],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Any,
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    *,
    stages: Stages,
    beside: tuple[Sequence[jax.Array], Sequence[Placement]] = ((), ()),
) -> Callable[[], tuple[Any, Any, list[jax.Array]]]:
    """Does what ``make_scan`` does, but leaves the layers to the schedule.

    ``shards``, and those of units inside the layers, are a stage's; other ``xs``, the
    layers' state, are those of all layers, (L, ...).

    Raises:
      UserError: the layers return much aux, or change their state by what they compute.
    """
    stacked = Inputs(list(shards), list(xs), carry, list(args))
    traced = trace_layer(fn, stacked, places, stacked=True)
    (_, aux), _, _ = traced.outputs
    aux = jax.tree.map(lambda x: jnp.zeros((stages.layers, *x.shape), x.dtype), aux)
    _check_aux(aux, carry, stages)
    changes = _changes(traced, xs, stages)

    stage = lax.axis_index(PIPE)
    used, rows = jnp.asarray(stages.used())[stage], jnp.asarray(stages.rows())[stage]
    of_stage = [x[rows] if x.shape[0] == stages.layers else x for x in xs]
    uneven = any(count < stages.longest for count in stages.counts())

    def outputs(weights, xs, carry, args):
        *xs, used, row = xs
        before, of_layers = carry
        (after, aux), *_ = fn(weights, xs, before, args)
        stack.check_carry(before, after)
        out = after, put_layer(of_layers, aux, row)
        if uneven:
            out = jax.tree.map(lambda new, old: jnp.where(used, new, old), out, carry)
        return (out, None), [], ()

    carry = carry, aux
    stacked = stacked._replace(xs=[*of_stage, used, rows], carry=carry)
    traced = trace_layer(outputs, stacked, places, stacked=True)
    program, ((after, _), *_) = traced.program, traced.outputs
    stacked = stacked._replace(args=[*args, *program.consts])
    prefetch = stack.prefetches(policy, places, stages.longest)
    # Weights are no residuals: not those of each micro-batch.
    policy = dataclasses.replace(policy, reshard_after_forward=True)
    number = parts_of(policy.remat, stages.longest)
    ends = [round(i * stages.longest / number) for i in range(number + 1)]
    parts = list(itertools.pairwise(ends))
    segments = stack.segments_of(traced, places, policy, parts, prefetch)
    operands, structure = jax.tree.flatten((stacked, segments))
    sizes = stages.longest, stages.per_device
    call = Call(segments, *sizes, prefetch, after, structure)

    def run() -> tuple[Any, Any, list[jax.Array]]:
        found = LAYERS.bind(*operands, layer=program, call=call)
        after, aux = jax.tree.unflatten(jax.tree.structure(carry), found)
        return after, (aux, *changes), gather(list(beside[0]), list(beside[1]))

    return run


def _check_aux(aux: Any, carry: Any, stages: Stages) -> None:
    """Raises UserError if aux exceeds a layer's output, with which it is sent."""
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (aux, carry)]
    if sizes[0] > sizes[1]:
        raise UserError(
            f"mesh: pipe: the aux of all layers of {stages.name!r} crosses stages with "
            f"each micro-batch, and has {sizes[0]:,} values beside the {sizes[1]:,} of "
            "a layer's output; return less (a sum), or leave pipe out of the mesh"
        )


def _changes(traced: TracedLayer, xs: Sequence[jax.Array], stages: Stages) -> list[Any]:
    """Returns the stacked changes of the layers' state, which depend on it alone."""
    inputs, layer, (_, *changes) = traced
    if not (number := len(jax.tree.leaves(changes))):
        return changes
    args = inputs.args[: len(inputs.args) - len(layer.consts)]
    inputs = inputs._replace(args=args)
    leaves = jax.tree.leaves(inputs)
    layer = jaxprs.flat_jaxpr(layer, leaves)
    wanted = [i + number >= len(layer.out_avals) for i in range(len(layer.out_avals))]
    jaxpr = jaxprs.consts_as_inputs(layer, leaves, layer.consts)
    needed = jaxprs.needed_for(jaxpr, wanted, effects=False)
    is_state = [x.shape[0] == stages.layers for x in xs]  # else shards of inner units
    of_state = jax.tree.broadcast((False, is_state, False, False), tuple(inputs))
    allowed = jax.tree.leaves(of_state)
    if any(used and not ok for used, ok in zip(needed[1], allowed, strict=False)):
        raise UserError(
            f"mesh: pipe: a layer of {stages.name!r} changes its state by what it "
            "computes (nnx.BatchNorm, say), micro-batch by micro-batch; use a layer "
            "without such state, or leave pipe out of the mesh"
        )

    def of_layer(_: None, state: list[jax.Array]) -> tuple[None, list[jax.Array]]:
        own = iter(state)
        of_xs = [next(own) if is_one else None for is_one in is_state]
        leaves = jax.tree.leaves(inputs._replace(xs=of_xs), is_leaf=lambda x: x is None)
        return None, jaxprs.run_used(*needed, [*leaves, *layer.consts])

    _, ys = lax.scan(of_layer, None, list(itertools.compress(xs, is_state)))
    return jax.tree.unflatten(jax.tree.structure(changes), ys)


class SplitProgram(NamedTuple):
    """A step's program, before and after the layers of its Stack.

    Attributes:
      call: the layers.
      before: ``before(*inputs)`` returns the operands of the call.
      after: ``after(*inputs, *carry)`` returns the program's results.
      types: of the operands.
      operands: the index of the input that each operand is, or None.
      of_layers: which results depend on the layers.
      of_parameters: which operands depend on the first inputs, the parameters.
    """

    call: Call
    before: Callable[..., list[Any]]
    after: Callable[..., list[Any]]
    types: list[Any]
    operands: list[int | None]
    of_layers: list[bool]
    of_parameters: list[bool]


def split_program(traced: core.ClosedJaxpr, parameters: int) -> SplitProgram:
    """Splits a traced program at the one call of its Stack.

    Raises:
      UserError: the Stack is called in a loop, a branch or a transform, not once, or
        the program calls back to Python outside of the layers.
    """
    jaxpr, number = traced.jaxpr, len(traced.jaxpr.invars)
    within = [i for i, eqn in enumerate(jaxpr.eqns) if jaxprs.has(eqn, {LAYERS.name})]
    (index, *others) = within or [None]
    if index is None or others or jaxpr.eqns[index].primitive is not LAYERS:
        raise UserError(
            "mesh: pipe: a step must call its Stack once, outside of loops, branches "
            "and transforms (jax.checkpoint, nnx.jit, another Unit)"
        )
    eqn = jaxpr.eqns[index]
    outside = [other for other in jaxpr.eqns if other is not eqn]
    if call := jaxprs.find(outside, {"debug_callback", "debug_print", "io_callback"}):
        line = lines.line_of(call, outside)
        raise UserError(
            f"mesh: pipe: {line}: loss_fn prints or calls back outside "
            "of the Stack's layers; leave that out, or leave pipe out of the mesh"
        )

    def before(*inputs: Any) -> list[Any]:
        env = jaxprs.environment(traced, inputs)
        return jaxprs.evaluate(jaxpr.eqns[:index], env, eqn.invars)

    def after(*inputs: Any) -> list[Any]:
        env = jaxprs.environment(traced, inputs[:number])
        env.update(zip(eqn.outvars, inputs[number:], strict=True))
        return jaxprs.evaluate(outside, env, jaxpr.outvars)

    def rule(found: Any, entering: list[int]) -> list[int] | None:
        return [1] * len(eqn.outvars) if found is eqn else None

    depends = dependencies(jaxpr, [0] * number, rule)
    bits = [int(i < parameters) for i in range(number)]
    of_operands = jaxpr.replace(eqns=jaxpr.eqns[:index], outvars=eqn.invars)
    place = {var: i for i, var in enumerate(jaxpr.invars)}
    return SplitProgram(
        eqn.params["call"],
        before,
        after,
        [x.aval for x in eqn.invars],
        [None if isinstance(x, core.Literal) else place.get(x) for x in eqn.invars],
        list(map(bool, depends)),
        list(map(bool, dependencies(of_operands, bits))),
    )
