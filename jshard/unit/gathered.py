"""A unit's weights gathered before a loop, as an ordinary module."""

import functools
from typing import Any, TypeVar

import jax
from flax import nnx

from jshard.comm.collectives import gather_leaf, scatter, sum_copies
from jshard.comm.varying import vary
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.unit.modules import Parts, Stack, Unit, prepare_layers
from jshard.unit.partition import select
from jshard.unit.unit import Parameters, barrier, map_present, unshard

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
    if not (parts := _parts(unit)):
        return unit
    weights = jax.tree.map(gather_leaf, parts.own.shards, parts.own.places)
    return parts.module(weights)  # pyright: ignore[reportReturnType]


def gathered_before(unit: M, x: jax.Array) -> tuple[M, jax.Array]:
    """``gathered(unit)`` and ``x``, for a head that is used on features ``x``.

    The gradient of ``x`` waits until the unit's own is scattered: without that, the
    backward of the layers below may run first, with the head's full gradient in memory.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    if not (parts := _parts(unit)):
        return unit, x
    own = parts.own
    out: Any = _gather_before(tuple(own.places), list(own.shards), vary(x))
    weights, x = out
    return parts.module(weights), x  # pyright: ignore[reportReturnType]


def gathered_during(unit: M, stack: Stack, x: Any, *args: Any) -> tuple[M, Any]:
    """``gathered(unit)`` and ``stack(x, *args)``: gathered while its last layer runs.

    For a head after a Stack: its weights arrive, and in the backward its gradient
    leaves, beside a layer's computation.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    if not (parts := _parts(unit)):
        return unit, stack(x, *args)
    following = Parameters(list(map(vary, parts.own.shards)), parts.own.places)
    run, inputs, finish = prepare_layers(stack, x, args, following)
    out, weights = finish(*run(*inputs))
    return parts.module(weights), out  # pyright: ignore[reportReturnType]


def _parts(unit: nnx.Module) -> Parts | None:
    """The parts of a Unit in a step; None where there is nothing to gather."""
    if isinstance(unit, Stack):
        raise UserError("jshard.gathered: a Stack gathers one layer at a time")
    if not isinstance(unit, Unit) or unit.unit_policy is None:
        return None
    return Parts(unit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_before(
    places: tuple[Placement, ...], shards: list[jax.Array], x: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """All weights, and ``x``, whose gradient waits until theirs are scattered."""
    return unshard(shards, list(places)), x


def _gather_before_forward(places, shards, x):
    return _gather_before(places, shards, x), shards


def _gather_before_backward(places, shards, cotangents):
    grads, x_ct = cotangents
    grads = select(grads, Parameters(shards, places).trained)
    parts, x_ct = barrier(map_present(scatter, grads, places), x_ct)
    return map_present(sum_copies, parts, shards), x_ct


_gather_before.defvjp(_gather_before_forward, _gather_before_backward)
