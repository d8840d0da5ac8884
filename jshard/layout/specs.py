"""Which dimension of a parameter is sharded, and what else is sharded like it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jshard.layout.layers import layer_dims
from jshard.mesh import AXES, FSDP
from jshard.policy import Policy

LOOKED_UP = "looked_up"  # metadata of an embedding's table, in a Unit of its own


def shard_dim(
    shape: tuple[int, ...],
    shards: int,
    *,
    layer_dims: int = 0,
    min_elements: int = 0,
    taken: Sequence[Any] = (),
    looked_up: bool = False,
) -> int | None:
    """The dimension to shard, counted from the end, or None to replicate.

    It is the first one, not counting the layer dimensions of a Stack, that ``shards``
    divides and no other mesh axis has taken: contiguous on the wire, no transposes.
    Of a table that is looked up it is the last one: every device has a part of each
    row (``jshard.comm.embedding``).

    Args:
      shape: the parameter's shape, layer dimensions first.
      shards: size of the fsdp axis.
      layer_dims: leading layer dimensions, never sharded.
      min_elements: parameters with fewer elements a layer are replicated.
      taken: for each dimension of one layer, the mesh axes it is split over already.
      looked_up: whether it is the table of an embedding.
    """
    own = shape[layer_dims:]
    if np.prod(own) < min_elements:
        return None
    for i, size in sorted(enumerate(own), reverse=looked_up):
        if size and size % shards == 0 and not any(taken[i : i + 1]):
            return i - len(own)
    return None


def is_annotated(variable: nnx.Variable) -> bool:
    """Whether Flax metadata names mesh axes for the dimensions of ``variable``."""
    return variable.get_metadata("out_sharding", None) is not None


def _other_axes(variable: nnx.Variable, mesh: Mesh) -> tuple[Any, ...]:
    """The automatic mesh axes that annotate each dimension of one layer."""
    names = variable.get_metadata("out_sharding", None) or ()
    free = set(mesh.axis_names) - set(AXES)

    def known(axes: Any) -> tuple[str, ...]:
        axes = axes if isinstance(axes, tuple) else (axes,)
        return tuple(axis for axis in axes if axis in free)

    return tuple(known(axes) or None for axes in names)


def sharded_dim(variable: nnx.Variable, policy: Policy, mesh: Mesh) -> int | None:
    """``shard_dim`` of a parameter, as its metadata, policy and mesh have it."""
    return shard_dim(
        np.shape(variable.get_value()),
        mesh.shape[FSDP],
        layer_dims=layer_dims(variable),
        min_elements=policy.min_shard_elements,
        taken=_other_axes(variable, mesh),
        looked_up=variable.get_metadata(LOOKED_UP, False),
    )


def param_spec(variable: nnx.Variable, dim: int | None, mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter, other mesh axes included.

    Args:
      variable: holds the global array, or an abstract one.
      dim: the sharded dimension, as ``sharded_dim`` gives it.
      mesh: what it is sharded over.
    """
    others = _other_axes(variable, mesh)
    if dim is None and not any(others):
        return PartitionSpec()
    ndim = len(np.shape(variable.get_value()))
    axes: list[Any] = [*[None] * layer_dims(variable), *others]
    axes += [None] * (ndim - len(axes))
    if dim is not None:
        axes[dim] = FSDP
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def manual_specs(specs: Any) -> Any:
    """The part of each spec that ``shard_map`` handles: the "fsdp" axis."""
    return jax.tree.map(
        lambda spec: PartitionSpec(*(a if a == FSDP else None for a in spec)), specs
    )


def follow(params: Any, values: Sequence[Any]) -> Callable[[tuple, Any], Any]:
    """Tells which parameter a leaf of an optimizer's state follows.

    A leaf whose path ends with a parameter's path, and has its shape, follows it
    (momenta, averages); others (counts, factored statistics) follow none. Names
    decide, not tree positions, so wrapped and masked optimizers work as they are.

    Args:
      params: the parameters.
      values: for each leaf of ``params``, what to find.

    Returns:
      ``find(path, leaf)``: the value of the parameter that the leaf follows, or None.
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
