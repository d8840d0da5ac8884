"""A layer traced once: its outputs, its residuals, and its transpose.

Of the residuals that the remat policy would keep, those that depend on the weights
alone (the gathered weights, their casts, their transposes, products of two weights) are
*not* kept: the backward pass rebuilds them from weights that it gathers again. This is
dataflow on the jaxpr, so it holds for every policy, ``everything_saveable`` included,
where a policy that looks at one primitive at a time would keep full weights of every
layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jshard.comm.varying import abstract_like, is_float
from jshard.compat.jaxprs import needed_for, run_used
from jshard.policy import Offload
from jshard.unit.dataflow import dependencies
from jshard.unit.partition import merge, select
from jshard.unit.remat import checkpoint, note_names


class Inputs(NamedTuple):
    """What a layer is called with: pytrees of arrays. Gradients have the same form.

    Attributes:
      weights: whole.
      xs: what else belongs to this layer: state, shards of units inside it.
      carry: what goes from layer to layer; of a Unit, the arguments of the call.
      args: the same for every layer.
    """

    weights: Any
    xs: Any
    carry: Any
    args: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer's function as a jaxpr.

    Attributes:
      inputs: abstract; what the function closes over is at the end of its ``args``.
      consts: what it closes over, so that this too gets gradients. The caller appends
        it to its own ``args``.
      outputs: a pytree of abstract arrays.
    """

    inputs: Inputs
    jaxpr: core.Jaxpr
    consts: list[Any]
    outputs: Any

    def __call__(self, inputs: Inputs) -> Any:
        """The outputs alone, for evaluation."""
        leaves = jax.tree.leaves(inputs)
        split = len(self.jaxpr.invars)
        consts = leaves[split:][: len(self.consts)]
        run = core.jaxpr_as_fun(core.ClosedJaxpr(self.jaxpr, consts))
        return jax.tree.unflatten(
            jax.tree.structure(self.outputs), run(*leaves[:split])
        )


def trace_layer(fn: Callable[..., Any], inputs: Inputs) -> TracedLayer:
    """Traces ``fn(weights, xs, carry, args)``, which returns a pytree of arrays."""
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)
    args = [*inputs.args, *map(abstract_like, traced.consts)]
    return TracedLayer(
        inputs._replace(args=args), traced.jaxpr, list(traced.consts), outputs
    )


class LinearizedLayer:
    """A traced layer with the residuals of its backward pass.

    Attributes:
      traced: the layer.
      consts: constants of derivative rules that users define, which nothing moves; the
        caller appends them to ``args``, behind those of ``traced``.
      reads: which weights the backward pass needs.
    """

    def __init__(
        self,
        traced: TracedLayer,
        trained: Sequence[bool],
        remat: Any,
        prevent_cse: bool,
    ):
        note_names(traced.jaxpr, remat)
        self.traced = traced
        # Weights have gradients where they are trained, all else where it is float.
        moves: Inputs = jax.tree.map(is_float, traced.inputs)
        moves = moves._replace(weights=list(trained))
        fn = checkpoint(traced, remat, prevent_cse=prevent_cse)

        def with_residuals(*inputs):
            fixed = select(Inputs(*inputs), jax.tree.map(lambda m: not m, moves))

            def of_moving(moving):
                outputs = fn(merge(moving, fixed))
                return differentiable(outputs, traced.outputs), outputs

            moving = select(Inputs(*inputs), moves)
            _, pullback, outputs = jax.vjp(of_moving, moving, has_aux=True)
            return outputs, pullback

        run, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(*traced.inputs)
        self._pullback = jax.tree.structure(shapes[1])
        self.consts = list(run.consts)

        def hoisted(consts, *leaves):
            return core.jaxpr_as_fun(core.ClosedJaxpr(run.jaxpr, consts))(*leaves)

        leaves = jax.tree.leaves(traced.inputs)
        consts = list(map(abstract_like, self.consts))
        jaxpr = jax.make_jaxpr(lambda *x: hoisted(x[len(leaves) :], *x[: len(leaves)]))(
            *leaves, *consts
        ).jaxpr
        self._sort_residuals(jaxpr, prefix=jax.tree.structure(shapes[0]).num_leaves)
        self._leaves_device = [
            isinstance(remat, Offload) and var not in set(jaxpr.invars)
            for var in self._kept
        ]

    def _sort_residuals(self, jaxpr: core.Jaxpr, prefix: int) -> None:
        """Into what is kept, since activations decide it, and what is built again."""
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
        for var, need in zip(jaxpr.outvars[prefix:], needs, strict=True):
            rebuilt = need in (0, of_weights, of_args) or var in free
            self._source.append(None if rebuilt else kept.setdefault(var, len(kept)))
        self._kept = list(kept)
        where = {index: i for i, index in reversed(list(enumerate(self._source)))}
        used = [
            index is not None and where[index] == i
            for i, index in enumerate(self._source)
        ]
        self._forward = needed_for(jaxpr, [True] * prefix + used)
        lost = [False] * prefix + [index is None for index in self._source]
        self._rebuild = needed_for(jaxpr, lost)
        self.reads = self._rebuild[1][: len(inputs.weights)]

    def forward(self, inputs: Inputs) -> tuple[Any, list[Any]]:
        """The outputs, and the residuals to keep until the backward pass."""
        structure = jax.tree.structure(self.traced.outputs)
        leaves = run_used(*self._forward, jax.tree.leaves(inputs))
        outputs, kept = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
        kept = self._move(kept, jax.memory.Space.Host)
        return jax.tree.unflatten(structure, outputs), kept

    def transpose(self, inputs: Inputs, kept: Sequence[Any], cotangents: Any) -> Inputs:
        """Gradients of the inputs.

        Args:
          inputs: without the carry, and with None for weights not in ``reads``.
          kept: by ``forward``.
          cotangents: of ``differentiable`` outputs.
        """
        carry = [None] * len(jax.tree.leaves(self.traced.inputs.carry))
        inputs = inputs._replace(carry=carry)
        leaves = jax.tree.leaves(inputs, is_leaf=lambda x: x is None)
        kept = self._move(kept, jax.memory.Space.Device)
        rebuilt = iter(run_used(*self._rebuild, leaves))
        residuals = [next(rebuilt) if i is None else kept[i] for i in self._source]
        (grads,) = jax.tree.unflatten(self._pullback, residuals)(cotangents)
        return grads._replace(args=[*grads.args, *[None] * len(self.consts)])

    def _move(self, kept: Sequence[Any], space: Any) -> list[Any]:
        """Residuals with those that are offloaded in another memory."""
        return [
            jax.device_put(x, space) if leaves else x
            for x, leaves in zip(kept, self._leaves_device, strict=True)
        ]


def differentiable(tree: Any, outputs: Any) -> Any:
    """``tree`` with None where an output of a layer is not float."""
    return select(tree, jax.tree.map(is_float, outputs))
