"""One Unit's passes, and what they share with those of a Stack."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jshard.comm.varying import abstract_like, is_float, vary, varying
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.policy import UnitPolicy
from jshard.unit.linearize import LinearizedLayer
from jshard.unit.weights import (
    full,
    gather_all,
    gather_read,
    hold,
    keep,
    scatter,
    to_gather,
)


def run_unit(
    fn: Callable[[list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
) -> list[jax.Array]:
    """One gather, one call of ``fn(weights, xs, inputs)``, one scatter backward.

    Args:
      fn: the unit on flat lists of arrays; returns a flat list.
      shards: local shards of the unit's own parameters.
      places: their placements.
      xs: what else belongs to the unit (its state, shards of units inside it).
      inputs: the call's arguments.
      policy: remat and reshard.
      moving_xs: which of ``xs`` have gradients.
    """
    xs, inputs = list(xs), [vary(x) if is_float(x) else x for x in inputs]
    layer = LinearizedLayer(
        lambda weights, xs, carry, args: fn(weights, xs, carry),
        full([abstract_like(s) for s in shards], places),
        [abstract_like(x) for x in xs],
        [abstract_like(x) for x in inputs],
        [],
        differentiable=[
            *(p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)),
            *moving_xs,
            *map(is_float, inputs),
        ],
        remat=policy.remat,
        prevent_cse=True,
    )

    read, reshard = layer.weights_read, policy.reshard_after_forward

    @jax.custom_vjp
    def run(shards, xs, inputs, args):
        shards, inputs = hold(shards, inputs)
        return layer.call(gather_all(shards, places), xs, inputs, args)

    def forward(shards, xs, inputs, args):
        needed, inputs = hold(shards, inputs)
        weights = gather_all(needed, places)
        outputs, kept = layer.forward(weights, xs, inputs, args)
        weights = keep(weights, places, read, reshard)
        # Else whole weights could wait to be split into what groups keep.
        if weights is not None and reshard is not False:
            weights, outputs = hold(weights, outputs)
        return outputs, (shards, xs, args, kept, weights)

    def backward(saved, cotangents):
        shards, xs, args, kept, weights = saved
        cotangents = floats(cotangents, layer.outputs)
        needed = to_gather(weights, shards, read)
        if reshard:
            needed, cotangents = hold(needed, cotangents)
        weights = gather_read(needed, places, read, reshard)
        grads, xs_grads, input_grads, arg_grads = layer.backward(
            weights, xs, args, kept, cotangents
        )
        return scatter(grads, places, shards), xs_grads, input_grads, arg_grads

    run.defvjp(forward, backward)
    return run(list(shards), xs, inputs, layer.consts)


def split_aux(result: Any, carry: Any) -> tuple[Any, Any, bool]:
    """Takes a layer's result, ``carry`` or ``(carry, aux)``, apart."""
    same = jax.tree.structure(carry)
    if jax.tree.structure(result) == same:
        return result, None, False
    if isinstance(result, tuple) and len(result) == 2:
        if jax.tree.structure(result[0]) == same:
            return result[0], result[1], True
    raise UserError(
        "a stacked layer must return its first argument's tree, or a pair of that and "
        f"aux; got {jax.tree.structure(result)} for {same}"
    )


def check_carry(carry: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raises UserError unless a layer returns the shapes and dtypes it is given."""
    for before, after in zip(carry, outputs, strict=False):
        if before.shape != after.shape or before.dtype != after.dtype:
            raise UserError(
                f"a stacked layer turns {before.dtype}{list(before.shape)} into "
                f"{after.dtype}{list(after.shape)}; equal layers must keep shape and "
                "dtype, so cast the stack's input or the layer's output"
            )


def carry_like(outputs: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    """A layer's outputs with the mesh types of its inputs."""
    return [vary(o, sorted(varying(c))) for o, c in zip(outputs, carry, strict=True)]


def floats(cotangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The cotangents of the floating outputs."""
    return [c for c, o in zip(cotangents, outputs, strict=True) if is_float(o)]
