"""The algorithm: a unit's weights are gathered, used and dropped.

A unit is a layer of a Stack, a Unit, or the root module. Between uses, every device
holds one shard of each of the unit's parameters.

    forward    weights = unshard(shards)                 all-gather
               outputs, residuals = layer(weights, inputs)
               kept = reshard(weights)                   drop, or keep a part or all
    backward   weights = unshard_again(kept or shards)   all-gather
               grads = transpose(weights, residuals, cotangents)
               scatter(grads)                            reduce-scatter
               all_reduce(grads)                         over replicas

``run_unit`` does this for one unit. ``stack.py`` scans it over the layers of a Stack,
and ``pipeline.py`` overlaps each layer's collectives with its neighbours' computation.

This is ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3) in the terms of PyTorch
FSDP (Zhao et al. 2023, section 3.2).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jshard.collectives.gather import gather_leaf, join, split
from jshard.collectives.reduce import all_reduce_in_unit, scatter
from jshard.fsdp.policy import Reshard, UnitPolicy
from jshard.layout.placement import Placement
from jshard.unit.float8 import in_float8
from jshard.unit.linearize import (
    Inputs,
    LinearizedLayer,
    differentiable,
    trace_layer,
)
from jshard.unit.parameters import Parameters, abstract, scales, unshard
from jshard.unit.partition import select


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """A layer whose weights exist only as shards between uses."""

    layer: LinearizedLayer  # as a function of full weights
    places: Sequence[Placement]  # of each parameter
    types: Sequence[jax.ShapeDtypeStruct]  # the abstract shard of each parameter
    reshard_after_forward: Reshard  # see UnitPolicy

    def forward(self, inputs: Inputs) -> tuple[Any, tuple[Any, Any]]:
        """Returns the outputs, and (residuals, kept weights) for the backward."""
        outputs, residuals = self.layer.forward(inputs)
        return outputs, (residuals, self.reshard(inputs.weights))

    def reshard(self, weights: Sequence[Any]) -> list[Any] | None:
        """Returns the weights that are kept for the backward.

        This is None if the backward gathers the shards again. Otherwise it is the full
        weight, or this device's part in its group, of each weight that it reads.
        """
        if self.reshard_after_forward is True:
            return None
        read = select(list(weights), self.layer.reads)
        if not (group := int(self.reshard_after_forward)):
            return read
        return map_present(lambda w, p: split(w, p, group), read, self.places)

    def unshard_again(
        self, kept: list[Any] | None, shards: Sequence[Any], arrived: Any, *, wait: bool
    ) -> tuple[list[Any], Any]:
        """Returns the weights that the backward reads (or None), and ``arrived``.

        They come from ``kept``, what ``reshard`` returned, or from ``shards`` if that
        is None. With ``wait``, no gather starts before ``arrived`` is computed.
        """
        source = select(list(shards), self.layer.reads) if kept is None else kept
        if wait:
            source, arrived = barrier(source, arrived)
        if self.reshard_after_forward is True:
            pairs = list(zip(self.places, scales(source, self.places), strict=True))
            gather = lambda shard, pair: gather_leaf(shard, *pair)
            return map_present(gather, source, pairs), arrived
        if group := int(self.reshard_after_forward):
            source = map_present(lambda x, p: join(x, p, group), source, self.places)
        return source, arrived

    def scatter(self, grads: Sequence[Any]) -> list[Any]:
        """Sums gradients of full weights over the devices that shard the parameters.

        None, which stands for a parameter without a gradient, stays None.
        """
        return map_present(scatter, grads, self.places)

    def all_reduce(self, grads: Sequence[Any]) -> list[Any]:
        """Sums over replicas, where this is not left to the end of the step.

        The results have the dtypes of the shards.
        """
        dtypes = [shard.dtype for shard in self.types]
        return map_present(all_reduce_in_unit, grads, self.places, dtypes)


def map_present(fn: Callable, values: Sequence[Any], *others: Sequence[Any]) -> list:
    """Maps ``fn(value, *others)`` over the values that are not None."""
    return [
        None if value is None else fn(value, *rest)
        for value, *rest in zip(values, *others, strict=True)
    ]


def run_unit(
    fn: Callable[[list, list, list, list], Any],
    own: Parameters,
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
) -> Any:
    """Calls ``fn(weights, xs, inputs, [])`` as one unit.

    Args:
      fn: the unit as a function of full weights; returns a pytree of arrays.
      own: the parameters that the unit owns.
      xs: its other arrays: state, and shards of units inside it.
      inputs: the arguments of the call.
      policy: remat and reshard.
    """
    types = Inputs(own.weight_types(), abstract(xs), abstract(inputs), [])
    traced = trace_layer(fn, types, own.places)
    own, traced = in_float8(own, traced)
    layer = LinearizedLayer(traced, own.trained, policy.remat, prevent_cse=True)
    unit = ShardedLayer(layer, own.places, own.types(), policy.reshard_after_forward)
    reshard = unit.reshard_after_forward

    @jax.custom_vjp
    def run(shards, xs, inputs, args):
        weights, inputs = unshard_after(inputs, shards, own.places)
        return traced(Inputs(weights, xs, inputs, args))

    def forward(shards, xs, inputs, args):
        weights, inputs = unshard_after(inputs, shards, own.places)
        outputs, (residuals, kept) = unit.forward(Inputs(weights, xs, inputs, args))
        # Otherwise full weights could stay in memory until they are split.
        if kept is not None and reshard is not False:
            kept, outputs = barrier(kept, outputs)
        return outputs, (shards, xs, args, residuals, kept)

    def backward(saved, cotangents) -> tuple:
        shards, xs, args, residuals, kept = saved
        cotangents = differentiable(cotangents, traced.outputs)
        weights, cotangents = unit.unshard_again(
            kept, shards, cotangents, wait=bool(reshard)
        )
        grads = layer.transpose(Inputs(weights, xs, [], args), residuals, cotangents)
        return (unit.all_reduce(unit.scatter(grads.weights)), *grads[1:])

    run.defvjp(forward, backward)
    return run(list(own.shards), list(xs), inputs, [*traced.consts, *layer.consts])


def unshard_after(
    arrived: Any, shards: Sequence[jax.Array], places: Sequence[Placement]
) -> tuple[list[jax.Array], Any]:
    """``unshard`` that waits for ``arrived``; returns the weights and ``arrived``."""
    shards, arrived = barrier(list(shards), arrived)
    return unshard(shards, list(places), scales(shards, places)), arrived


def barrier(tree: Any, arrived: Any) -> tuple[Any, Any]:
    """Returns both unchanged, but XLA must compute both before it uses either.

    Without it XLA could gather the weights of many units before the first one runs, or
    merge the backward's gathers with the forward's and keep the weights in between.
    """
    if not jax.tree.leaves(tree):
        return tree, arrived
    return _barrier((tree, arrived))


# JAX's own rule would give shards a tangent, of zeros, where only what waits has one:
# forward-mode derivatives of a unit's backward would then go through its gathers.
@jax.custom_jvp
def _barrier(trees: Any) -> Any:
    return lax.optimization_barrier(trees)


@functools.partial(_barrier.defjvp, symbolic_zeros=True)
def _tangents_pass(primals: Any, tangents: Any) -> Any:
    (trees,), (moving,) = primals, tangents
    return _barrier(trees), moving
