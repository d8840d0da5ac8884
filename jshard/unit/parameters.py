"""The parameters of a unit: shards between uses, full weights in use."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jshard.collectives.gather import gather_leaf
from jshard.fsdp.precision import is_float
from jshard.layout.placement import Placement

# unshard(shards, places, scales) -> full weights. A partial: it adds no stack frame.
unshard: Callable[..., Any] = functools.partial(jax.tree.map, gather_leaf)


def scales(shards: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """Returns the scale of each parameter in float8, and None for the others.

    The scales are the last of the shards (``jshard.unit.float8``).
    """
    return [
        None if shard is None or place.scale is None else shards[-1][place.scale]
        for shard, place in zip(shards, places, strict=True)
    ]


def abstract(tree: Any, *, layer: bool = False) -> Any:
    """Returns a pytree of arrays as abstract arrays of a step.

    With ``layer``, these are of one layer of stacked arrays (L, ...).
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape[1:] if layer else x.shape, x.dtype, sharding=sharding
        ),
        tree,
    )


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters that a unit owns."""

    shards: Sequence[jax.Array] = ()  # this device's; those of a Stack are (L, ...)
    places: Sequence[Placement] = ()

    @property
    def trained(self) -> list[bool]:
        """Which parameters have gradients."""
        pairs = zip(self.shards, self.places, strict=True)
        return [place.trainable and is_float(shard) for shard, place in pairs]

    def types(self, *, layer: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Returns the abstract shards, or those of a single layer if ``layer``."""
        return abstract(list(self.shards), layer=layer)

    def weight_types(self, *, layer: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Returns the abstract full weights, or those of one layer if ``layer``."""
        places = list(self.places)
        unshard_own = lambda shards: unshard(shards, places, scales(shards, places))
        traced = jax.make_jaxpr(unshard_own)(self.types(layer=layer))
        return abstract(traced.out_avals)
