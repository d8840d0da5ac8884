"""Traces a layer once, and splits it into outputs, residuals and transpose.

Some of the residuals that the remat policy would keep depend on the weights alone: the
gathered weights, their casts, their transposes, products of two weights. These are
*not* kept. The backward rebuilds them from weights that it gathers again. A dataflow
analysis of the jaxpr finds them, so this holds for every policy, including
``everything_saveable``. A JAX policy sees only one primitive at a time, and by itself
would keep the full weights of every layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jshard.compat.jaxprs import (
    CALLS,
    find,
    line_of,
    needed_for,
    run_used,
    with_outputs,
    without_effects,
)
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.policy import INPUTS, Offload
from jshard.precision import is_float
from jshard.unit.dataflow import dependencies
from jshard.unit.parameters import abstract
from jshard.unit.partial_sums import check_partial_sums
from jshard.unit.partition import Changed, merge, select
from jshard.unit.remat import checkpoint, note_names


class Inputs(NamedTuple):
    """The inputs of a layer, or their gradients, as pytrees of arrays."""

    weights: Any  # full weights
    xs: Any  # the layer's other arrays: state, and shards of units inside it
    carry: Any  # what one layer passes to the next; for a Unit, the call's arguments
    args: Any  # what all layers share


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer's function as a jaxpr.

    Attributes:
      inputs: abstract inputs; their ``args`` end with those for ``consts``.
      jaxpr: the function of the other inputs, with ``consts`` as its constants.
      consts: arrays that the function closes over. The caller appends them to its
        ``args``, so that they get gradients, too.
      outputs: a pytree of abstract arrays.
      handles: for each weight None, or an abstract array that stands for what ``decode``
        makes of it, and whose gradient is the weight's.
      decode: makes the weights that ``jaxpr`` takes of those in ``inputs``.
    """

    inputs: Inputs
    jaxpr: core.Jaxpr
    consts: list[Any]
    outputs: Any
    handles: Sequence[Any]
    decode: Callable[..., Any] = lambda weights, handles: weights

    def __call__(self, inputs: Inputs) -> Any:
        """Returns the outputs without residuals, for evaluation."""
        return self.run(inputs, [None] * len(self.handles))

    def run(self, inputs: Inputs, handles: Sequence[Any]) -> Any:
        """Returns the outputs, given arrays (or None) in place of ``handles``."""
        inputs = inputs._replace(weights=self.decode(inputs.weights, handles))
        leaves, split = jax.tree.leaves(inputs), len(self.jaxpr.invars)
        closed = core.ClosedJaxpr(self.jaxpr, leaves[split:][: len(self.consts)])
        outputs = core.jaxpr_as_fun(closed)(*leaves[:split])
        return jax.tree.unflatten(jax.tree.structure(self.outputs), outputs)


def trace_layer(
    fn: Callable[..., Any], inputs: Inputs, places: Sequence[Placement]
) -> TracedLayer:
    """Traces ``fn(weights, xs, carry, args)``, which returns a pytree of arrays.

    ``places`` are the placements of the weights. In what a layer ``Changed``, None
    stands for a weight that is unchanged: transforms of Flax (``nnx.remat``) set all
    that a module has, and full weights must not outlive the layer.
    """
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    check_partial_sums(traced.jaxpr, places)
    structure = jax.tree.structure(shapes)
    returned = _returned_weights(traced.jaxpr, len(inputs.weights))
    unchanged = jax.tree.leaves(
        jax.tree.map(
            lambda x: x if isinstance(x, Changed) else False,
            jax.tree.unflatten(structure, returned),
            is_leaf=lambda x: isinstance(x, Changed),
        )
    )
    outputs = jax.tree.unflatten(
        structure,
        [None if u else x for x, u in zip(traced.out_avals, unchanged, strict=True)],
    )
    if any(unchanged):
        traced = with_outputs(traced, [not u for u in unchanged])
    inputs = inputs._replace(args=[*inputs.args, *abstract(traced.consts)])
    handles = [None] * len(inputs.weights)
    return TracedLayer(inputs, traced.jaxpr, list(traced.consts), outputs, handles)


def _returned_weights(jaxpr: core.Jaxpr, number: int) -> list[bool]:
    """Returns which outputs are one of the first inputs, unchanged."""
    computed = 1 << number

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        return None if eqn.primitive.name in CALLS else [computed] * len(eqn.outvars)

    bits = [1 << i for i in range(number)]
    bits += [computed] * (len(jaxpr.invars) - number)
    return [0 < bit < computed for bit in dependencies(jaxpr, bits, rule)]


class LinearizedLayer:
    """A traced layer with the residuals of its backward.

    Attributes:
      traced: the layer.
      consts: constants of user-defined derivative rules, which get no gradients. The
        caller appends them to ``args``, after those of ``traced``.
      reads: whether the backward needs each weight.
    """

    def __init__(
        self,
        traced: TracedLayer,
        trained: Sequence[bool],
        remat: Any,
        prevent_cse: bool,
    ):
        note_names(traced.jaxpr, remat)
        if remat != "none" and (eqn := find(traced.jaxpr, {"io_callback"})):
            raise UserError(
                f"{line_of(eqn)}: an io_callback in a unit whose backward computes it "
                "again, which JAX refuses; use jax.pure_callback, or remat='none' for "
                "this unit (policy.overrides)"
            )
        self.traced = traced
        fn = checkpoint(traced.run, remat, prevent_cse=prevent_cse)

        def with_residuals(*inputs):
            inputs = Inputs(*inputs)
            zeros = lambda x: jnp.zeros(x.shape, x.dtype)
            handles = jax.tree.map(zeros, traced.handles)
            # Trained weights have gradients, and so have all other float inputs.
            moves: Inputs = jax.tree.map(is_float, inputs)
            pairs = zip(trained, handles, strict=True)
            moves = moves._replace(weights=[t and h is None for t, h in pairs])
            fixed = select(inputs, jax.tree.map(lambda m: not m, moves))

            def of_moving(moving, handles):
                outputs = fn(merge(moving, fixed), handles)
                return differentiable(outputs, traced.outputs), outputs

            moving = select(inputs, moves)
            _, pullback, outputs = jax.vjp(of_moving, moving, handles, has_aux=True)
            return outputs, pullback

        run, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(*traced.inputs)
        self._pullback = jax.tree.structure(shapes[1])
        self.consts = list(run.consts)

        leaves = jax.tree.leaves(traced.inputs)

        def hoisted(*inputs):
            closed = core.ClosedJaxpr(run.jaxpr, inputs[len(leaves) :])
            return core.jaxpr_as_fun(closed)(*inputs[: len(leaves)])

        jaxpr = jax.make_jaxpr(hoisted)(*leaves, *abstract(self.consts)).jaxpr
        self._sort_residuals(jaxpr, prefix=jax.tree.structure(shapes[0]).num_leaves)
        self._leaves_device = [
            isinstance(remat, Offload)
            and (INPUTS in remat.names or var not in set(jaxpr.invars))
            for var in self._kept
        ]

    def _sort_residuals(self, jaxpr: core.Jaxpr, prefix: int) -> None:
        """Splits residuals into those to keep and those to rebuild in the backward.

        Those that depend on weights alone, on ``args`` alone or on neither are rebuilt,
        and so are inputs other than the carry. All others are kept.
        """
        of_weights, of_args, of_rest = 1, 2, 4
        inputs = self.traced.inputs
        bits = Inputs(of_weights, of_rest, of_rest, of_args)
        needs = jax.tree.leaves(
            jax.tree.map(lambda b, x: [b] * len(jax.tree.leaves(x)), bits, inputs)
        )
        needs += [of_args] * len(self.consts)
        needs = dependencies(jaxpr, needs)[prefix:]
        before, carry = [len(jax.tree.leaves(x)) for x in (inputs[:2], inputs.carry)]
        free = set(jaxpr.invars) - set(jaxpr.invars[before : before + carry])
        kept: dict[Any, int] = {}
        self._source: list[int | None] = []  # index among the kept, or None
        first, lost = [], []  # whether the first to be kept of its kind; to be rebuilt
        for var, need in zip(jaxpr.outvars[prefix:], needs, strict=True):
            lost.append(need in (0, of_weights, of_args) or var in free)
            first.append(not lost[-1] and var not in kept)
            index = None if lost[-1] else kept.setdefault(var, len(kept))
            self._source.append(index)
        self._kept = list(kept)
        self._forward = needed_for(jaxpr, [True] * prefix + first)
        # The forward has printed and called back already.
        jaxpr = without_effects(jaxpr)
        self._rebuild = needed_for(jaxpr, [False] * prefix + lost)
        self.reads = self._rebuild[1][: len(inputs.weights)]

    def forward(self, inputs: Inputs) -> tuple[Any, list[Any]]:
        """Returns the outputs, and the residuals to keep for the backward."""
        structure = jax.tree.structure(self.traced.outputs)
        leaves = run_used(*self._forward, jax.tree.leaves(inputs))
        outputs, kept = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
        kept = self._move(kept, jax.memory.Space.Host)
        return jax.tree.unflatten(structure, outputs), kept

    def transpose(self, inputs: Inputs, kept: Sequence[Any], cotangents: Any) -> Inputs:
        """Returns the gradients of the inputs.

        Args:
          inputs: the inputs, with None for weights not in ``reads``; the carry is
            ignored.
          kept: the residuals that ``forward`` returned.
          cotangents: cotangents of the outputs, from ``differentiable``.
        """
        carry = [None] * len(jax.tree.leaves(self.traced.inputs.carry))
        inputs = inputs._replace(carry=carry)
        leaves = jax.tree.leaves(inputs, is_leaf=lambda x: x is None)
        kept = self._move(kept, jax.memory.Space.Device)
        rebuilt = iter(run_used(*self._rebuild, leaves))
        residuals = [next(rebuilt) if i is None else kept[i] for i in self._source]
        pullback = jax.tree.unflatten(self._pullback, residuals)
        grads, of_handles = pullback(cotangents)
        return grads._replace(
            weights=merge(grads.weights, of_handles),
            args=[*grads.args, *[None] * len(self.consts)],
        )

    def _move(self, kept: Sequence[Any], space: Any) -> list[Any]:
        """Moves offloaded residuals to the memory ``space``."""
        return [
            jax.device_put(x, space) if leaves else x
            for x, leaves in zip(kept, self._leaves_device, strict=True)
        ]


def differentiable(tree: Any, outputs: Any) -> Any:
    """Returns ``tree`` with None where the layer's output is not float."""
    return select(tree, jax.tree.map(is_float, outputs))
