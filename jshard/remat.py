"""What the backward pass of a layer keeps, recomputes, and gathers again.

A layer is traced once, together with its linearisation. Of the residuals that the
remat policy would keep, those that depend on the weights alone (the gathered weights,
their casts, their transposes, products of two weights) are *not* kept: the backward
pass rebuilds them from weights that it gathers again. This is dataflow on the jaxpr,
so it holds for every policy, ``everything_saveable`` included, where a policy that
looks at one primitive at a time would keep full weights of every layer.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval as pe

from jshard.collectives import abstract_like, is_float
from jshard.errors import UserError
from jshard.jaxprs import scan_body, scan_sizes

POLICIES = ("full", "dots", "none")


@dataclasses.dataclass(frozen=True, init=False)
class Names:
    """Remat policy: keep only activations named with ``checkpoint_name``."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        if not names or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"jshard.{type(self).__name__}{names!r}: give names of activations, "
                f"like jshard.{type(self).__name__}('attended', 'hidden')"
            )
        object.__setattr__(self, "names", names)


class Offload(Names):
    """Remat policy: activations named with ``checkpoint_name`` wait in host memory.

    They leave for pinned host memory in the forward and come back for the backward; a
    layer's input stays on the device, and all else is recomputed.
    """


def check_remat(remat: Any) -> None:
    """Raises UserError unless ``remat`` is a policy this version knows."""
    policy = callable(remat) and not isinstance(remat, type)
    if remat in POLICIES or isinstance(remat, Names) or policy:
        return
    raise UserError(
        f"policy.remat: {remat!r} is not one of {', '.join(POLICIES)}, "
        "jshard.Names(...), jshard.Offload(...) or a jax.checkpoint policy"
    )


@dataclasses.dataclass(frozen=True)
class _Shown:
    """What a step's layers asked for, and the names that their activations have."""

    policies: set[Names] = dataclasses.field(default_factory=set)
    found: set[str] = dataclasses.field(default_factory=set)


_shown = contextvars.ContextVar[_Shown | None]("shown", default=None)


@contextlib.contextmanager
def checked_names() -> Iterator[None]:
    """Raises UserError, at its end, for a name that no layer traced meanwhile has."""
    shown = _Shown()
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)
    wanted = {name for remat in shown.policies for name in remat.names}
    if unknown := sorted(wanted - shown.found):
        raise UserError(
            f"policy.remat: no activation is named {', '.join(map(repr, unknown))} "
            "(with jax.ad_checkpoint.checkpoint_name); named are: "
            f"{', '.join(sorted(shown.found)) or 'none'}"
        )


def names_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """The names of its activations (``jax.ad_checkpoint.checkpoint_name``)."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in core.jaxprs_in_params(eqn.params):
            yield from names_in(inner)


def checkpoint(fn: Callable, remat: Any, *, prevent_cse: bool) -> Callable:
    """Applies the remat policy named ``remat`` to a layer function."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return fn
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif isinstance(remat, Names):
        policy = policies.save_only_these_names(*remat.names)
    else:
        policy = remat
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


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
        if (shown := _shown.get()) is not None:
            shown.found.update(names_in(traced.jaxpr))
            shown.policies.update([remat] if isinstance(remat, Names) else [])

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
        leaves = _run(self._forward, self._forward_used, [*weights, *xs, *carry, *args])
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
            _run(self._rebuild, self._rebuild_used, [*weights, *xs, *carry, *args])
        )
        leaves = [next(rebuilt) if i is None else kept[i] for i in self._source]
        grads = iter(jax.tree.unflatten(self._pullback, leaves)(list(cotangents)))
        return self._split([next(grads) if d else None for d in self.differentiable])


def without_dead_code(fn: Callable) -> Callable:
    """``fn`` on a flat list of arrays, less what its outputs do not need."""

    def run(*leaves):
        traced = jax.make_jaxpr(fn)(*leaves)

        def hoisted(consts, leaves):
            closed = core.ClosedJaxpr(traced.jaxpr, consts)
            return core.jaxpr_as_fun(closed)(*leaves)

        jaxpr = jax.make_jaxpr(hoisted)(traced.consts, leaves).jaxpr
        jaxpr, used = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return _run(jaxpr, used, [*traced.consts, *leaves])

    return run


def _run(jaxpr: Any, used: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    needed = [x for x, u in zip(inputs, used, strict=True) if u]
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*needed)


def dependencies(
    jaxpr: Any, inputs: Sequence[int], *, by_value: bool = False
) -> list[int]:
    """Which inputs each output depends on, as the union of the inputs' bits.

    Calls are followed inside; loops to a fixed point; anything else with an inner
    jaxpr depends, all of it, on everything that enters.

    Args:
      jaxpr: of the outputs.
      inputs: bits of its inputs.
      by_value: what passes an optimization_barrier is what it was; else it needs all
        that passes, as it does where it is computed again.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        entering = [read(atom) for atom in eqn.invars]
        out = equation_dependencies(eqn, entering, by_value=by_value)
        for var, bits in zip(eqn.outvars, out, strict=True):
            env[var] = bits
    return [read(atom) for atom in jaxpr.outvars]


def equation_dependencies(
    eqn: Any, entering: list[int], *, by_value: bool = False
) -> list[int]:
    """The same for one equation."""
    if eqn.primitive.name == "scan":
        return _scan(eqn, entering, by_value)
    if by_value and eqn.primitive.name == "optimization_barrier":
        return entering
    if by_value and eqn.primitive.name == "select_n" and not eqn.invars[0].aval.shape:
        entering = entering[1:]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(entering):
        if eqn.primitive.name not in ("while", "cond"):
            return dependencies(inner, entering, by_value=by_value)
    together = 0
    for bits in entering:
        together |= bits
    return [together] * len(eqn.outvars)


def _scan(eqn: Any, entering: list[int], by_value: bool) -> list[int]:
    body, (num_consts, num_carry) = scan_body(eqn), scan_sizes(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        out = dependencies(body, entering, by_value=by_value)
        merged = [a | b for a, b in zip(entering[carry], out[:num_carry], strict=True)]
        if merged == entering[carry]:
            return out
        entering = [*entering[:num_consts], *merged, *entering[carry.stop :]]
