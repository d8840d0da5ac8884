"""The algorithm: how the weights of a unit come, are used, and go.

A unit is a layer of a Stack, a Unit, or the root. Between its uses every device holds a
shard of each of its parameters.

    forward    weights = unshard(shards)                all_gather
               outputs, residuals = layer(weights, ...)
               kept = reshard(weights)                  nothing, a part, or all of them
    backward   weights = unshard again                  all_gather, of kept or shards
               gradients = layer's transpose(weights, residuals, cotangents)
               reduce_scatter(gradients)                psum_scatter, psum of copies

``run_unit`` does this for one unit; ``stack.py`` scans it over layers, one after
another, and ``pipeline.py`` with the transfers of a layer beside its neighbours'
computation.

(ZeRO stage 3: Rajbhandari et al. 2020, section 5.3. FSDP: Zhao et al. 2023, section
3.2, whose words these are.)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jshard.comm.collectives import all_gather, join, scatter, split, sum_copies
from jshard.comm.varying import abstract_like, is_float, vary, varying
from jshard.layout.placement import Placement
from jshard.mesh import manual_axes
from jshard.policy import Reshard, UnitPolicy
from jshard.unit.linearize import (
    Inputs,
    LinearizedLayer,
    differentiable,
    trace_layer,
)
from jshard.unit.partition import select

# unshard(shards, places) -> whole weights. No function of its own: see the walk in
# docs/architecture.md.
unshard: Callable[..., Any] = functools.partial(jax.tree.map, all_gather)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A unit's own parameters as shards; of a Stack they are (L, ...) each.

    Attributes:
      shards: this device's.
      places: where each lives, and how it travels.
    """

    shards: Sequence[jax.Array] = ()
    places: Sequence[Placement] = ()

    @property
    def trained(self) -> list[bool]:
        """Which of them have gradients."""
        pairs = zip(self.shards, self.places, strict=True)
        return [place.trainable and is_float(shard) for shard, place in pairs]

    def types(self, *, layer: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Abstract shards, of one layer if ``layer``."""
        return [abstract_like(shard, layer=layer) for shard in self.shards]


def whole(types: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """Abstract whole weights of abstract shards."""
    traced = jax.make_jaxpr(lambda shards: unshard(shards, places))(list(types))
    return list(map(abstract_like, traced.out_avals))


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """A layer whose weights are shards between its uses.

    Attributes:
      layer: on whole weights.
      places: of its parameters.
      types: its abstract shards.
      reshard_after_forward: see ``UnitPolicy``.
    """

    layer: LinearizedLayer
    places: Sequence[Placement]
    types: Sequence[jax.ShapeDtypeStruct]
    reshard_after_forward: Reshard

    def forward(self, inputs: Inputs) -> tuple[Any, tuple[Any, Any]]:
        """The outputs over whole weights, and (residuals, kept weights)."""
        outputs, residuals = self.layer.forward(inputs)
        return outputs, (residuals, self.reshard(inputs.weights))

    def reshard(self, weights: Sequence[Any]) -> list[Any] | None:
        """What is kept of whole weights: of those that the backward reads."""
        if self.reshard_after_forward is True:
            return None
        group = int(self.reshard_after_forward)  # 0 where False: all of each
        read = select(list(weights), self.layer.reads)
        return self._each(lambda w, p: split(w, p, group) if group else w, read)

    def source(self, kept: list[Any] | None, shards: Sequence[Any]) -> list[Any]:
        """What the backward starts from: kept weights, or the shards."""
        return select(list(shards), self.layer.reads) if kept is None else kept

    def unshard_again(self, source: list[Any]) -> list[Any]:
        """The weights that the backward reads, None for the others."""
        if self.reshard_after_forward is True:
            return self._each(all_gather, source)
        group = int(self.reshard_after_forward)
        return self._each(lambda x, p: join(x, p, group) if group else x, source)

    def reduce_scatter(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients of shards from those of whole weights, None where there is none."""
        return self.sum_copies(self.scatter(grads))

    def scatter(self, grads: Sequence[Any]) -> list[Any]:
        """The first half of ``reduce_scatter``: sums over "fsdp"."""
        return self._each(scatter, grads)

    def sum_copies(self, parts: Sequence[Any]) -> list[Any]:
        """The second half: sums over "replica", in the shards' dtypes."""
        return map_present(sum_copies, parts, self.types)

    def _each(self, fn: Callable, values: Sequence[Any]) -> list[Any]:
        return map_present(fn, values, self.places)


def map_present(fn: Callable, values: Sequence[Any], others: Sequence[Any]) -> list:
    """``fn(value, other)`` for each value, None where that is None."""
    return [
        None if value is None else fn(value, other)
        for value, other in zip(values, others, strict=True)
    ]


def run_unit(
    fn: Callable[[list, list, list, list], Any],
    own: Parameters,
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
) -> Any:
    """One gather, one call of ``fn(weights, xs, inputs, args)``, one scatter backward.

    Args:
      fn: the unit, which returns a pytree; its ``args`` are empty.
      own: the unit's own parameters.
      xs: what else belongs to the unit (its state, shards of units inside it).
      inputs: the call's arguments.
      policy: remat and reshard.
    """
    inputs = [vary(x) if is_float(x) else x for x in inputs]
    abstract = Inputs(
        whole(own.types(), own.places),
        list(map(abstract_like, xs)),
        list(map(abstract_like, inputs)),
        [],
    )
    traced = trace_layer(fn, abstract)
    layer = LinearizedLayer(traced, own.trained, policy.remat, prevent_cse=True)
    unit = ShardedLayer(layer, own.places, own.types(), policy.reshard_after_forward)

    @jax.custom_vjp
    def run(shards, xs, inputs, args):
        shards, inputs = barrier(shards, inputs)
        return traced(Inputs(unshard(shards, own.places), xs, inputs, args))

    def forward(shards, xs, inputs, args):
        needed, inputs = barrier(shards, inputs)
        weights = unshard(needed, own.places)
        outputs, (residuals, kept) = unit.forward(Inputs(weights, xs, inputs, args))
        # Else whole weights could wait to be split into what groups keep.
        if kept is not None and unit.reshard_after_forward is not False:
            kept, outputs = barrier(kept, outputs)
        return outputs, (shards, xs, args, residuals, kept)

    def backward(saved, cotangents) -> tuple:
        shards, xs, args, residuals, kept = saved
        cotangents = differentiable(cotangents, traced.outputs)
        source = unit.source(kept, shards)
        if unit.reshard_after_forward:
            source, cotangents = barrier(source, cotangents)
        weights = unit.unshard_again(source)
        grads = layer.transpose(Inputs(weights, xs, [], args), residuals, cotangents)
        return (unit.reduce_scatter(grads.weights), *grads[1:])

    run.defvjp(forward, backward)
    return run(list(own.shards), list(xs), inputs, [*traced.consts, *layer.consts])


def barrier(tree: Any, arrived: Any) -> tuple[Any, Any]:
    """Both as they are, but to XLA neither is there before the other is.

    Else XLA could gather the weights of many units before the first runs, or merge
    the backward's gathers with the forward's and keep the weights in between.

    A barrier types all that passes it as varying, so what does not vary of ``arrived``
    stays out.
    """
    if not jax.tree.leaves(tree):
        return tree, arrived
    leaves, structure = jax.tree.flatten(arrived)
    late = [set(varying(x)) == set(manual_axes()) for x in leaves]
    passing = [x for x, is_late in zip(leaves, late, strict=True) if is_late]
    tree, passing = lax.optimization_barrier((tree, passing))
    passed = iter(passing)
    leaves = [
        next(passed) if is_late else x for x, is_late in zip(leaves, late, strict=True)
    ]
    return tree, jax.tree.unflatten(structure, leaves)
