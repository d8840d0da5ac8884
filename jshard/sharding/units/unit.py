"""The algorithm: a unit's weights are gathered, used and dropped.

A unit is a layer of a Stack, a Unit, or the root module. Between uses, every device
holds one shard of each of the unit's parameters.

    forward    weights = gather(shards)                  all-gather
               outputs, residuals = layer.forward(weights, inputs)
               kept = drop(weights)                      keep nothing, a part, or all
    backward   weights = gather_again(kept or shards)    all-gather
               grads = layer.transpose(weights, residuals, cotangents)
               parts = scatter(grads)                    reduce-scatter
               reduce(parts)                             all-reduce, over replicas

``run_unit`` does this for one unit. ``stack.py`` scans it over the layers of a Stack,
and ``prefetch.py`` overlaps each layer's collectives with its neighbours' computation.

This is ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3) in the terms of PyTorch
FSDP (Zhao et al. 2023, section 3.2).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jshard.sharding.collectives.gather import all_gather, gather, join_parts, take_part
from jshard.sharding.collectives.reduce import all_reduce_in_unit
from jshard.sharding.collectives.reduce import scatter as scatter_leaf
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.policy import UnitPolicy
from jshard.sharding.units.linearize import (
    Inputs,
    Layer,
    floats_of,
    select,
    trace_layer,
)


def run_unit(
    fn: Callable[[list, list, list, list], Any],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
) -> Any:
    """Returns ``fn(weights, xs, inputs, [])``, run as one unit; see ``trace_layer``.

    ``shards`` are this device's, of the parameters that the unit owns, ``xs`` its other
    arrays (state, and shards of units inside it), ``inputs`` those of the call.
    """
    shards, places = list(shards), list(places)
    sharded = Inputs(shards, list(xs), inputs, [])
    traced = trace_layer(fn, sharded, places)
    layer = Layer(traced, places, policy, straight=True)

    @jax.custom_vjp
    def run(sharded, layer):
        shards, carry = barrier(sharded.weights, sharded.carry)
        weights = gather(shards, places)
        return layer.evaluate(sharded._replace(weights=weights, carry=carry))

    def forward(sharded, layer):
        # Without the barrier XLA may gather many units' weights before the first runs.
        shards, carry = barrier(sharded.weights, sharded.carry)
        weights = gather(shards, places)
        inputs = sharded._replace(weights=weights, carry=carry)
        outputs, residuals = layer.forward(inputs)
        kept = drop(weights, layer)
        # Otherwise full weights could stay in memory until they are split.
        if kept is not None and layer.reshard is not False:
            kept, outputs = barrier(kept, outputs)
        return outputs, (sharded._replace(carry=[]), layer, residuals, kept)

    def backward(saved, cotangents) -> tuple[Inputs, None]:
        sharded, layer, residuals, kept = saved
        cotangents = floats_of(cotangents, layer.outputs)
        source = kept
        if kept is None:
            source = select(sharded.weights, layer.needed_in_backward)
        if layer.reshard:  # else the gather could be merged with the forward's
            source, cotangents = barrier(source, cotangents)
        weights = gather_again(source, layer)
        inputs = sharded._replace(weights=weights)
        grads = layer.transpose(inputs, residuals, cotangents)
        parts = scatter(grads.weights, places)
        # Otherwise XLA may keep the gradients of many units for one scatter. A barrier
        # for each, so that those of inputs that are not trained are not computed.
        passed = jax.tree.map(lambda grad: barrier(parts, grad)[1], grads[1:])
        return Inputs(reduce(parts, places, sharded.weights), *passed), None

    run.defvjp(forward, backward)
    return run(sharded._replace(args=list(traced.program.consts)), layer)


def drop(weights: Sequence[Any], layer: Layer) -> list[Any] | None:
    """Returns what is kept of each weight that is needed in the backward.

    This is the full weight, or this device's part in its group; None if the backward
    gathers the shards again.
    """
    if layer.reshard is True:
        return None
    needed = select(list(weights), list(layer.needed_in_backward))
    if not (group := int(layer.reshard)):
        return needed
    return map_present(lambda w, p: take_part(w, p, group), needed, layer.places)


def gather_again(source: Sequence[Any], layer: Layer) -> list[Any]:
    """Returns the weights needed in the backward, from what ``drop`` returned.

    ``source`` is the shards if that is None.
    """
    if layer.reshard is True:
        return map_present(all_gather, source, layer.places)
    if group := int(layer.reshard):
        return map_present(lambda x, p: join_parts(x, p, group), source, layer.places)
    return list(source)


def scatter(grads: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """Sums gradients of full weights over the devices that shard the parameters."""
    return map_present(scatter_leaf, grads, places)


def reduce(
    parts: Sequence[Any], places: Sequence[Placement], shards: Sequence[Any]
) -> list[Any]:
    """Sums scattered gradients over replicas, where the step does not do it at its end.

    The results have the dtypes of the shards.
    """
    reduce_leaf = lambda part, place, like: all_reduce_in_unit(part, place, like.dtype)
    return map_present(reduce_leaf, parts, places, shards)


def map_present(fn: Callable, values: Sequence[Any], *others: Sequence[Any]) -> list:
    """Maps ``fn(value, *others)`` over the values that are not None."""
    return [
        None if value is None else fn(value, *rest)
        for value, *rest in zip(values, *others, strict=True)
    ]


def barrier(tree: Any, after: Any) -> tuple[Any, Any]:
    """Returns both unchanged, but XLA must compute both before it uses either."""
    if not jax.tree.leaves(tree):
        return tree, after
    return _barrier((tree, after))


# JAX's own rule would give shards a tangent, of zeros, where only what waits has one:
# forward-mode derivatives of a unit's backward would then go through its gathers.
@jax.custom_jvp
def _barrier(trees: Any) -> Any:
    return lax.optimization_barrier(trees)


@functools.partial(_barrier.defjvp, symbolic_zeros=True)
def _tangents_pass(primals: Any, tangents: Any) -> Any:
    (trees,), (moving,) = primals, tangents
    return _barrier(trees), moving
