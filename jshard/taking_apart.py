"""A pytree as its arrays and what puts others in their place."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def take_apart(tree: Any) -> tuple[list[jax.Array], Callable[[Iterable[Any]], Any]]:
    """The arrays of ``tree``, and what puts others in their place.

    Other leaves (flags, names, functions) are static, as in a plain call.
    """
    leaves, structure = jax.tree.flatten(tree)
    static = [None if _is_array(x) else (x,) for x in leaves]

    def with_arrays(arrays: Iterable[Any]) -> Any:
        values = iter(arrays)
        merged = [next(values) if leaf is None else leaf[0] for leaf in static]
        return jax.tree.unflatten(structure, merged)

    return [jnp.asarray(x) for x in leaves if _is_array(x)], with_arrays
