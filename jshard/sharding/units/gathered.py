"""A unit's weights gathered ahead of a loop, as an ordinary module."""

from typing import Any, TypeVar, overload

import jax
from flax import nnx

from jshard.sharding.collectives.gather import gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.units.linearize import select
from jshard.sharding.units.modules import Stack, Unit, open_unit, prepare_layers
from jshard.sharding.units.unit import barrier, reduce, scatter
from jshard.system.errors import UserError

M = TypeVar("M", bound=nnx.Module)
X = TypeVar("X")


@overload
def gathered(unit: M) -> M: ...


@overload
def gathered(unit: M, *, before: X) -> tuple[M, X]: ...


@overload
def gathered(unit: M, *, during: tuple[Any, ...], **kwargs: Any) -> tuple[M, Any]: ...


def gathered(
    unit: Any,
    *,
    before: Any = None,
    during: tuple[Any, ...] | None = None,
    **kwargs: Any,
) -> Any:
    """Returns the plain module with full weights, for use ahead of a loop.

    A chunked loss calls the head many times. ``head = jshard.gathered(self.head)``
    gathers its weights once and keeps them, and its gradient is reduce-scattered once.
    Units inside ``unit`` still gather for themselves. Outside a jshard step this
    returns ``unit`` itself.

    ``before`` and ``during`` say when, for a head that is applied to features. Its full
    gradient is then scattered before the backward of the layers below it, which could
    otherwise run first, with that gradient in memory:

    - ``head, x = gathered(self.head, before=x)``: the gradient of ``x`` waits for the
      reduce-scatter.
    - ``head, x = gathered(self.head, during=(self.blocks, x, *args))`` also calls
      ``self.blocks(x, *args)``, a Stack: the head is gathered, and in the backward
      scattered, while the Stack's last layer computes.

    Args:
      unit: the Unit.
      before: arrays that the plain module is applied to.
      during: a Stack and what it is called with.
      **kwargs: what the Stack is called with by keyword.

    Returns:
      The plain module; with ``before`` or ``during``, a pair of it and these arrays, or
      what the Stack returns.

    Raises:
      UserError: ``unit`` is a Stack, whose layers are gathered one at a time; both
        ``before`` and ``during`` are given; or keywords without ``during``.
    """
    if before is not None and during is not None:
        raise UserError("jshard.gathered: give before= or during=, not both")
    if kwargs and during is None:
        raise UserError(f"jshard.gathered: {next(iter(kwargs))}= needs during=")
    if isinstance(unit, Stack):
        raise UserError("jshard.gathered: a Stack gathers one layer at a time")
    stack, x, *args = during or (None, before)
    if not isinstance(unit, Unit) or unit.unit_policy is None:  # nothing is gathered
        out = x if stack is None else stack(x, *args, **kwargs)
        return unit if out is None else (unit, out)
    shards, places, _, module = open_unit(unit)
    if stack is not None:
        run, finish = prepare_layers(stack, x, (tuple(args), kwargs), (shards, places))
        out, weights = finish(*run())
        return module(weights), out
    if before is None:
        return module(gather(shards, places))
    weights, before = _gather_before(shards, places, before)
    return module(weights), before


def _gather_before(
    shards: list[jax.Array], places: list[Placement], x: Any
) -> tuple[list[jax.Array], Any]:
    """Gathers; the gradient of ``x`` waits for the reduce-scatter of the shards'."""
    trained = [place.gradient.trainable for place in places]

    @jax.custom_vjp
    def run(shards, x):
        return gather(shards, places), x

    def backward(shards, cotangents):
        grads, x_ct = cotangents
        scattered = scatter(select(grads, trained), places)
        scattered, x_ct = barrier(scattered, x_ct)
        return reduce(scattered, places, shards), x_ct

    run.defvjp(lambda shards, x: (run(shards, x), shards), backward)
    return run(shards, x)
