"""A layer traced once: its outputs, its residuals, and its transpose.

Of the residuals that the remat policy would keep, those that depend on the weights
alone (the gathered weights, their casts, their transposes, products of two weights) are
*not* kept: the backward pass rebuilds them from weights that it gathers again. This is
dataflow on the jaxpr, so it holds for every policy, ``everything_saveable`` included,
where a policy that looks at one primitive at a time would keep full weights of every
layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval as pe

from jshard.comm.varying import abstract_like, is_float
from jshard.compat.jaxprs import run_used
from jshard.policy import Offload
from jshard.unit.dataflow import dependencies
from jshard.unit.remat import checkpoint, note_names

# What a value depends on, as bits.
_WEIGHTS, _ARGS, _REST = 1, 2, 4


class LinearizedLayer:
    """One layer, traced with the residuals of its backward pass.

    The layer is ``fn(weights, xs, carry, args) -> outputs`` on flat lists of arrays:
    full weights; what else belongs to this layer; the carry; and ``args``, the same
    for every layer. Values that ``fn`` closes over are hoisted into ``args``, so they
    too get gradients.

    Attributes:
      consts: the hoisted values; the caller appends them to its ``args``.
      outputs: abstract outputs of ``fn``, flat.
      kept: abstract residuals that are kept until the backward pass.
      weights_read: indices of the weights that the backward pass needs.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        weights: Sequence[Any],
        xs: Sequence[Any],
        carry: Sequence[Any],
        args: Sequence[Any],
        *,
        differentiable: Sequence[bool],
        remat: Any,
        prevent_cse: bool,
    ):
        groups = (weights, xs, carry, args)
        self._sizes = [len(group) for group in groups]
        flat = [x for group in groups for x in group]
        traced = jax.make_jaxpr(lambda *leaves: fn(*self._split(leaves)))(*flat)
        self.consts = list(traced.consts)
        self.outputs = list(traced.out_avals)
        num_leaves = len(flat)
        note_names(traced.jaxpr, remat)

        def primal(*leaves):
            consts = leaves[num_leaves:][: len(traced.consts)]
            closed = core.ClosedJaxpr(traced.jaxpr, consts)
            return core.jaxpr_as_fun(closed)(*leaves[:num_leaves])

        self._primal = primal
        self._sizes[3] += len(self.consts)
        self._offloads = isinstance(remat, Offload)
        self._float_out = [is_float(aval) for aval in self.outputs]
        self.differentiable = [*differentiable, *map(is_float, self.consts)]
        flat += [abstract_like(const) for const in self.consts]
        self._linearize(checkpoint(primal, remat, prevent_cse=prevent_cse), flat)

    def _split(self, leaves: Sequence[Any]) -> list[list[Any]]:
        groups, start = [], 0
        for size in self._sizes:
            groups.append(list(leaves[start : start + size]))
            start += size
        return groups

    def _linearize(self, fn: Callable, flat: list[Any]) -> None:
        """Traces outputs and residuals, and sorts the residuals by what they need."""

        def with_residuals(*leaves):
            moving = [x for x, d in zip(leaves, self.differentiable, strict=True) if d]

            def of_moving(*moving):
                rest = iter(moving)
                outputs = fn(
                    *(
                        next(rest) if d else x
                        for x, d in zip(leaves, self.differentiable, strict=True)
                    )
                )
                moved = [o for o, f in zip(outputs, self._float_out, strict=True) if f]
                return moved, outputs

            _, pullback, outputs = jax.vjp(of_moving, *moving, has_aux=True)
            residuals, structure = jax.tree.flatten(pullback)
            treedef.append(structure)
            return [*outputs, *residuals]

        treedef: list[Any] = []
        traced = jax.make_jaxpr(with_residuals)(*flat)
        (self._pullback,) = treedef

        def hoisted(*leaves):
            closed = core.ClosedJaxpr(traced.jaxpr, leaves[len(flat) :])
            return core.jaxpr_as_fun(closed)(*leaves[: len(flat)])

        consts = traced.consts  # of derivatives that users define; nothing moves them
        self.consts += consts
        self._sizes[3] += len(consts)
        self.differentiable += [False] * len(consts)
        jaxpr = jax.make_jaxpr(hoisted)(*flat, *map(abstract_like, consts)).jaxpr
        count = len(self.outputs)
        bits = [_WEIGHTS, _REST, _REST, _ARGS]
        inputs = [
            b for b, size in zip(bits, self._sizes, strict=True) for _ in range(size)
        ]
        needs = dependencies(jaxpr, inputs)[count:]
        residuals = jaxpr.outvars[count:]
        carry_start = self._sizes[0] + self._sizes[1]
        carry = jaxpr.invars[carry_start : carry_start + self._sizes[2]]
        free = set(jaxpr.invars) - set(carry)
        # Kept: what depends on the activations, once each; all else is rebuilt.
        kept: dict[Any, int] = {}
        self._source: list[int | None] = []  # index among the kept, or None
        for var, need in zip(residuals, needs, strict=True):
            rebuilt = need in (0, _WEIGHTS, _ARGS) or var in free
            self._source.append(None if rebuilt else kept.setdefault(var, len(kept)))
        self.kept = [abstract_like(var.aval) for var in kept]
        inputs_kept = set(jaxpr.invars)
        self._leaves = [self._offloads and var not in inputs_kept for var in kept]
        first = {index: i for i, index in reversed(list(enumerate(self._source)))}
        used = [True] * count + [
            index is not None and first[index] == i
            for i, index in enumerate(self._source)
        ]
        self._forward, self._forward_used = pe.dce_jaxpr(jaxpr, used)
        lost = [False] * count + [index is None for index in self._source]
        self._rebuild, self._rebuild_used = pe.dce_jaxpr(jaxpr, lost)
        read = self._rebuild_used[: self._sizes[0]]
        self.weights_read = [i for i, r in enumerate(read) if r]

    def call(self, weights, xs, carry, args) -> list[Any]:
        """Outputs alone, for evaluation."""
        return self._primal(*weights, *xs, *carry, *args)

    def forward(self, weights, xs, carry, args) -> tuple[list[Any], list[Any]]:
        """Outputs, and the residuals to keep until the backward pass."""
        leaves = run_used(
            self._forward, self._forward_used, [*weights, *xs, *carry, *args]
        )
        outputs, kept = leaves[: len(self.outputs)], leaves[len(self.outputs) :]
        return outputs, self._moved(kept, jax.memory.Space.Host)

    def _moved(self, kept: Sequence[Any], space: Any) -> list[Any]:
        """Residuals with those that are offloaded in another memory."""
        return [
            jax.device_put(x, space) if leaves else x
            for x, leaves in zip(kept, self._leaves, strict=True)
        ]

    def backward(self, weights, xs, args, kept, cotangents) -> list[list[Any]]:
        """Gradients as (weights, xs, carry, args), None where there is none.

        ``weights`` holds the weights in ``weights_read``; the others may be None.
        ``cotangents`` are those of the floating outputs.
        """
        carry = [None] * self._sizes[2]
        kept = self._moved(kept, jax.memory.Space.Device)
        rebuilt = iter(
            run_used(self._rebuild, self._rebuild_used, [*weights, *xs, *carry, *args])
        )
        leaves = [next(rebuilt) if i is None else kept[i] for i in self._source]
        grads = iter(jax.tree.unflatten(self._pullback, leaves)(list(cotangents)))
        return self._split([next(grads) if d else None for d in self.differentiable])
