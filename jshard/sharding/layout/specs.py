"""Chooses the sharded dimension of parameters and of the arrays that follow them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.padding import Padding, padded_dim, shape_of_layer
from jshard.sharding.layout.placement import Placement
from jshard.sharding.layout.splits import WHOLE, Parts
from jshard.sharding.settings.mesh import (
    AXES,
    FSDP,
    REPLICA,
    mesh_axes,
    names_of,
    shard_axes,
    shards_of,
)
from jshard.sharding.settings.policy import Policy
from jshard.system.errors import UserError

# Metadata key of an embedding table that is a Unit of its own.
LOOKED_UP = "looked_up"


def shard_dim(
    shape: tuple[int, ...],
    shards: int,
    *,
    layer_dims: int = 0,
    min_elements: int = 0,
    taken: Sequence[Any] = (),
    parts: Mapping[int, int] | None = None,
    looked_up: bool = False,
) -> int | None:
    """Returns the dimension to shard, counted from the end, or None to replicate.

    This is the first dimension after the layer dimensions that ``shards`` divides and
    that no other mesh axis splits. Shards of the first dimension are contiguous, so
    collectives need no transposes. Embedding tables use the last such dimension
    instead, so that every device has a part of each row
    (``collectives/embedding.py``).

    Args:
      shape: the parameter's shape, layer dimensions first.
      shards: the number of shards.
      layer_dims: the number of leading layer dimensions, which are never sharded.
      min_elements: parameters with fewer elements per layer are replicated.
      taken: for each dimension of one layer, the automatic mesh axes that split it.
      parts: in how many parts a dimension, counted from the end, is split already, of
        each of which the shards are.
      looked_up: whether the parameter is an embedding table that is a Unit of its own.
    """
    own = shape[layer_dims:]
    if np.prod(own) < min_elements:
        return None
    for i, size in sorted(enumerate(own), reverse=looked_up):
        size //= (parts or {}).get(i - len(own), 1)
        if size and size % shards == 0 and not any(taken[i : i + 1]):
            return i - len(own)
    return None


def is_annotated(variable: nnx.Variable) -> bool:
    """Returns whether Flax metadata assigns mesh axes to dimensions of ``variable``."""
    return variable.get_metadata("out_sharding", None) is not None


def _other_axes(variable: nnx.Variable, mesh: Mesh) -> tuple[Any, ...]:
    """Returns, for each dimension of one layer, the annotated automatic mesh axes."""
    names = variable.get_metadata("out_sharding", None) or ()
    free = set(mesh.axis_names) - set(AXES)
    known = (tuple(axis for axis in names_of(axes) if axis in free) for axes in names)
    return tuple(axes or None for axes in known)


def sharded_over(parts: Parts, mesh: Mesh) -> tuple[str, ...] | None:
    """Returns the axes that shard a parameter; None for all that shard parameters."""
    splits = {axis for _, axis in parts.splits}
    if not splits:
        return None
    axes = mesh_axes(mesh)
    return tuple(axis for axis in axes if axis != REPLICA and axis not in splits)


def sharded_dim(
    variable: nnx.Variable, policy: Policy, mesh: Mesh, parts: Parts = WHOLE
) -> tuple[int | None, Padding | None]:
    """Returns the sharded dimension of a parameter, and how it is padded if it is.

    They follow from the exact shape, the metadata, the policy and the mesh.
    """
    sizes = {dim: mesh.shape[axis] for dim, axis in parts.splits}
    shape, others = shape_of_layer(variable), _other_axes(variable, mesh)
    shards = shards_of(mesh) // math.prod(sizes.values())
    fewest, over = policy.min_shard_elements, sharded_over(parts, mesh)
    axes = tuple(names_of(over or shard_axes(mesh)))
    for split, axis in parts.splits:
        if shape[split] % sizes[split]:
            padding = _of_vocabulary(shape, split, sizes[split], shards, (axis, *axes))
            return (None if math.prod(shape) < fewest else split), padding
    looked_up = variable.get_metadata(LOOKED_UP, False)
    how: dict[str, Any] = {"min_elements": fewest, "looked_up": looked_up}
    dim = shard_dim(shape, shards, parts=sizes, taken=others, **how)
    if dim is not None or math.prod(shape) < fewest:
        return dim, None
    taken = [*sizes, *(i - len(shape) for i, axes in enumerate(others) if axes)]
    dim = padded_dim(shape, shards, taken, looked_up=looked_up)
    if dim is None:
        return None, None
    return dim, Padding(shape, dim, shape[dim] + -shape[dim] % shards, axes)


def _of_vocabulary(
    shape: tuple[int, ...], dim: int, n: int, shards: int, axes: tuple[str, ...]
) -> Padding:
    """Returns how a dimension is padded that an axis of ``n`` devices should split.

    That is for parts and shards together, so that a head and its bias are split alike.

    Raises:
      UserError: A device would have nothing but padding.
    """
    size = shape[dim] + -shape[dim] % (n * shards)
    if size // n * (n - 1) >= shape[dim]:
        raise UserError(
            f"mesh: {axes[0]}={n} splits a vocabulary of {shape[dim]}, and a device "
            "would have nothing but padding; use fewer devices"
        )
    return Padding(shape, dim, size, axes)


def param_spec(variable: nnx.Variable, place: Placement, mesh: Mesh) -> PartitionSpec:
    """Returns the PartitionSpec of one parameter, including other mesh axes."""
    others, dim = _other_axes(variable, mesh), place.sharding.dim
    if dim is None and not any(others) and not place.part.splits:
        return PartitionSpec()
    ndim = len(np.shape(variable.get_value()))
    axes: list[Any] = [*[None] * layer_dims(variable), *others]
    axes += [None] * (ndim - len(axes))
    for split, axis in place.part.splits:
        axes[split] = axis
    if dim is not None:
        over = names_of(place.sharding.over or shard_axes(mesh))
        if place.part.splits:  # of a device's part, if both split this dimension
            over = (*names_of(axes[dim]), *over)
        axes[dim] = over[0] if len(over) == 1 else over
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def manual_specs(specs: Any, mesh: Mesh) -> Any:
    """Returns the specs reduced to the axes that ``shard_map`` splits."""
    manual = set(mesh_axes(mesh))
    return jax.tree.map(
        lambda spec: PartitionSpec(
            *(a if manual.issuperset(names_of(a)) else None for a in spec)
        ),
        specs,
    )


def is_sharded(spec: PartitionSpec) -> bool:
    """Returns whether a spec shards an array over "fsdp"."""
    return any(FSDP in names_of(axes) for axes in spec)


def follow(params: Any, values: Sequence[Any]) -> Callable[[tuple, Any], Any]:
    """Returns ``find(path, leaf)``: the value of the parameter that a leaf follows.

    ``values`` are those of the leaves of ``params``. An optimizer's leaf follows a
    parameter if its path ends with the parameter's path and the shapes are equal.
    Momenta and averages do; counts and factored statistics follow none, and get None.
    Paths are compared by name rather than by tree position, so wrapped and masked
    optimizers work unchanged.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        tuple(map(str, path)): (np.shape(leaf), value)
        for (path, leaf), value in zip(leaves, values, strict=True)
    }
    lengths = sorted({len(path) for path in by_path}, reverse=True)

    def find(path: tuple[Any, ...], leaf: Any) -> Any:
        names = tuple(map(str, path))
        for length in lengths:
            shape, value = by_path.get(names[len(names) - length :], (None, None))
            if shape == np.shape(leaf):
                return value
        return None

    return find


def is_table(module: Any) -> bool:
    """Returns whether ``module`` is exactly an ``nnx.Embed`` or a Unit of one."""
    return getattr(module, "plain_class", type(module)) is nnx.Embed


def mark_table(module: Any) -> None:
    """Marks the table of an embedding module, so that its columns are sharded.

    Other modules are left unchanged.
    """
    if is_table(module):
        module.embedding.set_metadata(LOOKED_UP, True)
