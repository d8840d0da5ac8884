"""Maps the update of one layer over a stack of layers, sharded over the devices.

An all-to-all gives each device one of every n layers, complete, and another returns the
shards of the results. No matrix is gathered, no work is done twice, and a device holds
one complete layer at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jshard.fsdp.mesh import axes_of, shard_axes, shards_of
from jshard.layout.specs import shard_dim


def map_whole_layers(
    fn: Callable[..., Any], args: tuple, mesh: Mesh, min_elements: int
) -> Any:
    """Computes ``jax.vmap(fn)(*args)`` of pytrees of global arrays, (L, ...) each.

    Runs n complete layers at a time, each on its own device. Arrays with fewer than
    ``min_elements`` a layer are replicated.
    """
    shards = shards_of(mesh)
    if shards == 1:
        return jax.vmap(fn)(*args)
    length = jax.tree.leaves(args)[0].shape[0]
    rounds = -(-length // shards)

    def dims(arrays: Any) -> list[int | None]:
        leaves = jax.tree.leaves(arrays)
        return [shard_dim(x.shape, shards, min_elements=min_elements) for x in leaves]

    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
    outputs = jax.eval_shape(fn, *layer)
    structure, result = map(jax.tree.structure, (args, outputs))
    of = jax.tree.leaves
    dims_in, dims_out = dims(layer), dims(outputs)

    def to_rounds(x: jax.Array) -> jax.Array:
        padding = [(0, rounds * shards - length), *[(0, 0)] * (x.ndim - 1)]
        x = jnp.pad(x, padding) if rounds * shards > length else x
        return x.reshape(rounds, shards, *x.shape[1:])

    def one_round(values: list[jax.Array]) -> list[jax.Array]:
        mine = structure.unflatten(map(_to_owner, values, dims_in))
        made = map(jnp.asarray, of(fn(*mine)))
        return list(map(_from_owner, made, dims_out))

    def local(values: list[jax.Array]) -> list[jax.Array]:
        return lax.map(one_round, list(map(to_rounds, values)))

    axes = shard_axes(mesh)

    def spec(leading: int, x: Any, dim: int | None) -> P:
        """Returns the spec of (..., *x.shape), split at ``dim`` from the end."""
        return P() if dim is None else P(*[None] * (leading + x.ndim + dim), axes)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([spec(1, x, d) for x, d in zip(of(layer), dims_in, strict=True)],),
        # What is not sharded stays with the owner of the layer, dimension 1.
        out_specs=[
            P(None, axes) if d is None else spec(2, x, d)
            for x, d in zip(of(outputs), dims_out, strict=True)
        ],
        axis_names=set(axes_of(mesh)),
        check_vma=False,
    )
    made = mapped(of(args))  # (rounds, shards, ...) each
    return result.unflatten(x.reshape(-1, *x.shape[2:])[:length] for x in made)


def _to_owner(x: jax.Array, dim: int | None) -> jax.Array:
    """Exchanges (n, ...) shards of n layers for the full layer this device owns."""
    if dim is None:
        return x[lax.axis_index(shard_axes())]
    return lax.all_to_all(x, shard_axes(), 0, x.ndim + dim, tiled=True)[0]


def _from_owner(x: jax.Array, dim: int | None) -> jax.Array:
    """Does the inverse of ``_to_owner``."""
    if dim is None:
        return x[None]
    return lax.all_to_all(x[None], shard_axes(), x.ndim + 1 + dim, 0, tiled=True)
