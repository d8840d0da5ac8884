"""A unit's weights gathered ahead of a loop, as an ordinary module."""

from typing import Any, TypeVar

import jax
from flax import nnx

from jshard.errors import UserError
from jshard.unit.modules import Stack, Unit, open_unit, prepare_layers
from jshard.unit.partition import abstract, select
from jshard.unit.unit import barrier, gather, reduce, scatter

M = TypeVar("M", bound=nnx.Module)


def gathered(unit: M) -> M:
    """Returns the plain module with full weights, for use ahead of a loop.

    A chunked loss calls the head many times. ``head = jshard.gathered(self.head)``
    gathers its weights once and keeps them, and its gradient is reduce-scattered once.
    Units inside ``unit`` still gather for themselves. Outside a jshard step this
    returns ``unit`` itself.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    if not (parts := _parts(unit)):
        return unit
    shards, places, _, module = parts
    return module(gather(shards, places))  # pyright: ignore[reportReturnType]


def gathered_before(unit: M, x: jax.Array) -> tuple[M, jax.Array]:
    """Returns ``gathered(unit)`` and ``x``, for a head that is applied to features.

    The gradient of ``x`` waits for the reduce-scatter of the unit's gradient.
    Otherwise the backward of the layers below could run first, with the head's full
    gradient in memory.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    if not (parts := _parts(unit)):
        return unit, x
    shards, places, _, module = parts
    types, trained = abstract(shards), [place.trainable for place in places]

    @jax.custom_vjp
    def gather_before(shards, x):
        return gather(shards, places), x

    def backward(_, cotangents):
        grads, x_ct = cotangents
        scattered = scatter(select(grads, trained), places)
        scattered, x_ct = barrier(scattered, x_ct)
        return reduce(scattered, places, types), x_ct

    gather_before.defvjp(lambda *inputs: (gather_before(*inputs), None), backward)
    weights, x = gather_before(shards, x)
    return module(weights), x  # pyright: ignore[reportReturnType]


def gathered_during(unit: M, stack: Stack, x: Any, *args: Any) -> tuple[M, Any]:
    """Returns ``gathered(unit)`` and ``stack(x, *args)``.

    For a head after a Stack: its weights are gathered, and in the backward its gradient
    is reduce-scattered, while the Stack's last layer computes.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time.
    """
    if not (parts := _parts(unit)):
        return unit, stack(x, *args)
    shards, places, _, module = parts
    run, finish = prepare_layers(stack, x, args, (shards, places))
    out, weights = finish(*run())
    return module(weights), out  # pyright: ignore[reportReturnType]


def _parts(unit: nnx.Module) -> tuple | None:
    """Returns the parts of a Unit in a step; None where nothing is gathered."""
    if isinstance(unit, Stack):
        raise UserError("jshard.gathered: a Stack gathers one layer at a time")
    if not isinstance(unit, Unit) or unit.unit_policy is None:
        return None
    return open_unit(unit)
