"""A tree as its arrays and the rest, in which each object is once."""

import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.sharding.collectives.shards import is_shard, shard_of, with_array
from jshard.sharding.layout.variables import opened
from jshard.system.compat.jaxprs import Static


def partition(
    tree: Any, keys: Mapping[int, Any] = types.MappingProxyType({})
) -> tuple[list[jax.Array], Static]:
    """Splits ``tree`` into its arrays and the rest: structure, flags, names, functions.

    What is in it twice is once in both. The array of a sharded parameter is this
    device's shard; its Variable is in the rest. In place of objects that have their
    ``id`` in ``keys``, the rest has their keys.
    """
    nodes, objects = _nodes(tree, keys)
    pairs = zip(nodes, objects, strict=True)
    arrays = [x for (kind, _), x in pairs if kind == "array"]
    arrays = [jnp.asarray(s.array if (s := shard_of(x)) else x) for x in arrays]
    return arrays, Static(nodes)


def combine(
    arrays: Iterable[jax.Array],
    rest: Static,
    originals: Mapping[Any, Any] = types.MappingProxyType({}),
) -> Any:
    """Reverses ``partition``, with these arrays, and ``originals`` by their keys."""
    return combine_all(arrays, rest, originals)[-1]


def combine_all(
    arrays: Iterable[jax.Array],
    rest: Static,
    originals: Mapping[Any, Any] = types.MappingProxyType({}),
) -> list[Any]:
    """Returns all objects of a tree, which is the last; otherwise as ``combine``."""
    values, made = iter(arrays), []
    for kind, part in rest.value:
        if kind == "array":
            made.append(with_array(part, next(values)))
        elif kind == "key":
            made.append(originals[part])
        elif kind == "tree":
            build, children = part
            made.append(build([made[i] for i in children]))
        else:
            made.append(part)
    return made


def objects_in(
    tree: Any, keys: Mapping[int, Any] = types.MappingProxyType({})
) -> list[Any]:
    """Returns all objects in a tree, each once, in the order of ``combine_all``."""
    return _nodes(tree, keys)[1]


def _nodes(tree: Any, keys: Mapping[int, Any]) -> tuple[list[tuple], list[Any]]:
    """Returns what makes each object in a tree, children first, and the objects."""
    found: dict[int, tuple] = {}
    _visit(tree, keys, found)
    return [node for _, node, _ in found.values()], [x for *_, x in found.values()]


def _visit(x: Any, keys: Mapping[int, Any], found: dict[int, tuple]) -> int:
    """Adds (place, node, object) by ``id``, children first; returns the place."""
    if id(x) in found:
        return found[id(x)][0]
    if id(x) in keys:
        node = "key", keys[id(x)]
    elif is_shard(x):
        node = "array", x
    elif isinstance(x, (jax.Array, np.ndarray)):
        node = "array", None
    elif (parts := opened(x)) is None:
        node = "object", x
    else:
        children, build = parts
        node = "tree", (build, [_visit(child, keys, found) for child in children])
    place = len(found)
    found[id(x)] = place, node, x
    return place
