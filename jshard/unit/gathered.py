"""A unit's weights gathered before a loop, as an ordinary module."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jshard.comm.collectives import gather_leaf
from jshard.comm.varying import vary
from jshard.errors import UserError
from jshard.layout.variables import is_variable
from jshard.unit.modules import Stack, Unit, make_plain, own_parameters, run_layers
from jshard.unit.shards import shard_of, show
from jshard.unit.weights import gather_before

M = TypeVar("M", bound=nnx.Module)


def gathered(unit: M) -> M:
    """The plain module with full weights, for use before a loop.

    A chunked loss calls the head many times: ``head = jshard.gathered(self.head)``
    gathers once, its gradient is scattered once, and the weights are kept in between.
    Outside a jshard step it is the module itself. Units inside still gather for
    themselves.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    return _gathered(unit, lambda own: [gather_leaf(v, p) for v, p in own])


def gathered_before(unit: M, x: jax.Array) -> tuple[M, jax.Array]:
    """``gathered(unit)`` and ``x``, for a head that is used on features ``x``.

    The gradient of ``x`` waits until the unit's own is scattered: without that, the
    backward of the layers below may run first, with the head's full gradient in memory.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    passed = [x]

    def gather(own):
        shards, places = [v for v, _ in own], tuple(p for _, p in own)
        out: Any = gather_before(places, shards, vary(x))
        weights, passed[0] = out
        return weights

    return _gathered(unit, gather), passed[0]


def gathered_during(unit: M, stack: Stack, x: Any, *args: Any) -> tuple[M, Any]:
    """``gathered(unit)`` and ``stack(x, *args)``: gathered while its last layer runs.

    For a head after a Stack: its weights arrive, and in the backward its gradient
    leaves, beside a layer's computation.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    result = []

    def gather(own):
        shards, places = [v for v, _ in own], [p for _, p in own]
        out, weights = run_layers(stack, x, args, list(map(vary, shards)), places)
        result[:] = [out]
        return weights

    module = _gathered(unit, gather)
    return module, result[0] if result else stack(x, *args)


def _gathered(unit: M, gather: Callable[[list], list]) -> M:
    """The plain module over what ``gather`` makes of its (shard, Placement) pairs."""
    if isinstance(unit, Stack):
        raise UserError("jshard.gathered: a Stack gathers one layer at a time")
    if not isinstance(unit, Unit) or unit.unit_policy is None:
        return unit
    graphdef, own, rest = nnx.split(unit, own_parameters(unit), ...)
    variables, tree = jax.tree.flatten(own, is_leaf=is_variable)
    shards = [shard for v in variables if (shard := shard_of(v))]
    weights = gather([(shard.array, shard.place) for shard in shards])
    full = [v.copy(w) for v, w in zip(variables, weights, strict=True)]
    # Variables that are not gathered stay the same objects: their updates count.
    module = nnx.merge(graphdef, jax.tree.unflatten(tree, full), rest)
    for variable in full:
        show(variable)
    make_plain(module)
    return module
