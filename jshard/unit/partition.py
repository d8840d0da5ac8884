"""Splits a pytree into its arrays and the rest, and joins them, as in equinox."""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard.compat.jaxprs import Static
from jshard.unit.shards import array_of, is_shard, with_array


def partition(tree: Any) -> tuple[list[jax.Array], Static]:
    """Splits ``tree`` into its arrays and the rest: structure, flags, names, functions.

    The array of a sharded parameter is this device's shard; its Variable is in the
    rest.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shard)
    arrays = [array_of(x) for x in leaves]
    is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in arrays]
    found = [jnp.asarray(x) for x in itertools.compress(arrays, is_array)]
    rest = [None if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves]
    return found, Static((structure, rest, is_array))


def combine(arrays: Iterable[jax.Array], rest: Static) -> Any:
    """Reverses ``partition``, with these arrays."""
    values, (structure, leaves, is_array) = iter(arrays), rest.value
    leaves = [
        with_array(leaf, next(values)) if is_one else leaf
        for leaf, is_one in zip(leaves, is_array, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def select(tree: Any, wanted: Any) -> Any:
    """Returns ``tree`` with None for what is False in ``wanted``, a prefix of it."""
    return jax.tree.map(lambda w, x: x if w else None, wanted, tree)


def merge(first: Any, second: Any) -> Any:
    """Returns ``first`` with each None replaced by the leaf of ``second``."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None
    )


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
