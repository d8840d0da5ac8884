"""Partition and combine: a pytree as its arrays and the rest, as in equinox."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.unit.shards import array_of, is_shard, with_array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that is no array, as a pytree without leaves.

    So a traced function can return it.
    """

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Skeleton:
    """A pytree without its arrays: its structure, flags, names and functions.

    Itself it is a pytree without leaves, so that a traced function can return it.

    Attributes:
      structure: of the pytree.
      leaves: its leaves, None in place of arrays; of parameters, their Variables.
      is_array: which of them are arrays, or parameters that are shards.
    """

    structure: Any
    leaves: tuple[Any, ...]
    is_array: tuple[bool, ...]


def partition(tree: Any) -> tuple[list[jax.Array], Skeleton]:
    """The arrays of ``tree``, and the rest of it.

    Of a sharded parameter the array is this device's shard.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shard)
    arrays = [array_of(x) for x in leaves]
    is_array = tuple(isinstance(x, (jax.Array, np.ndarray)) for x in arrays)
    found = [jnp.asarray(x) for x, a in zip(arrays, is_array, strict=True) if a]
    rest = (None if isinstance(x, (jax.Array, np.ndarray)) else x for x in leaves)
    return found, Skeleton(structure, tuple(rest), is_array)


def combine(arrays: Iterable[jax.Array], skeleton: Skeleton) -> Any:
    """The pytree that ``partition`` took apart, with other arrays."""
    values = iter(arrays)
    leaves = [
        with_array(leaf, next(values)) if is_array else leaf
        for leaf, is_array in zip(skeleton.leaves, skeleton.is_array, strict=True)
    ]
    return jax.tree.unflatten(skeleton.structure, leaves)


def select(tree: Any, wanted: Any) -> Any:
    """``tree`` with None for the leaves that are not ``wanted``, a tree of bools."""
    return jax.tree.map(lambda x, w: x if w else None, tree, wanted)


def merge(first: Any, second: Any) -> Any:
    """``first`` with the leaves of ``second`` where it has None."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None
    )
