"""A pytree as its arrays and what puts others in their place."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.unit.shards import array_of, is_shard, with_array


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def take_apart(tree: Any) -> tuple[list[jax.Array], Callable[[Iterable[Any]], Any]]:
    """The arrays of ``tree``, and what puts others in their place.

    Of a sharded parameter it is this device's shard. Other leaves (flags, names,
    functions) are static, as in a plain call.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_shard)
    arrays = [array_of(x) for x in leaves]

    def with_arrays(new: Iterable[Any]) -> Any:
        values = iter(new)
        merged = [
            with_array(leaf, next(values)) if _is_array(array) else leaf
            for leaf, array in zip(leaves, arrays, strict=True)
        ]
        return jax.tree.unflatten(structure, merged)

    return [jnp.asarray(x) for x in arrays if _is_array(x)], with_arrays
