"""Parameters that the shards do not divide: padded at rest, exact where they are read.

Arrays of a mesh have shards of equal size. Where no dimension of a parameter divides by
the number of shards, one is padded with zeros: in the state, on the wire, and in
gradients. Models, optimizers, checkpoints and exports see the exact shape.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.variables import is_variable

PADDING = "padding"  # metadata key of a padded parameter, and of what follows it

# The first dimension is contiguous on the wire. Another is taken if that saves more
# than this part of a parameter.
WORTH = 1 / 32


@dataclasses.dataclass(frozen=True)
class Padding:
    """How a parameter is padded.

    Attributes:
      shape: the exact shape of one layer.
      dim: the padded dimension, counted from the end.
      size: its size with the padding.
      axes: the mesh axes that shard it.
    """

    shape: tuple[int, ...]
    dim: int
    size: int
    axes: tuple[str, ...]


def padded_dim(
    shape: tuple[int, ...],
    shards: int,
    taken: Sequence[int] = (),
    *,
    looked_up: bool = False,
) -> int | None:
    """Returns the dimension to pad, counted from the end; None if there is none.

    ``shape`` is that of one layer. Other axes split the dimensions in ``taken``. Of an
    embedding table that is a Unit of its own (``looked_up``) columns are sharded.
    """
    dims = [i - len(shape) for i, size in enumerate(shape) if size]
    dims = [dim for dim in dims if dim not in taken]
    if looked_up:
        dims = dims[-1:]
    # The part of the parameter that padding adds, of each dimension.
    added = {dim: (-shape[dim] % shards) / shape[dim] for dim in dims}
    best = min(added.values(), default=0)
    return next((dim for dim in dims if added[dim] <= best + WORTH), None)


def padding_of(variable: nnx.Variable) -> Padding | None:
    """Returns how a parameter, or what follows one, is padded at rest."""
    return variable.get_metadata(PADDING, None)


def padding_now(leaf: Any) -> Padding | None:
    """Returns how a variable is padded now; None if it, or another leaf, is not."""
    padding = padding_of(leaf) if is_variable(leaf) else None
    if padding is None:
        return None
    shape = list(padding.shape)
    shape[padding.dim] = padding.size
    return padding if _ends(leaf, tuple(shape)) else None


def shape_of_layer(variable: nnx.Variable) -> tuple[int, ...]:
    """Returns the exact shape of one layer of a parameter."""
    padding = padding_of(variable)
    if padding is not None:
        return padding.shape
    return np.shape(variable.get_value())[layer_dims(variable) :]


def pad(tree: Any, mesh: Any) -> Any:
    """Pads the variables that have the exact shape of a padded parameter."""

    def one(variable: Any) -> Any:
        padding = padding_of(variable) if is_variable(variable) else None
        if padding is None or not _ends(variable, padding.shape):
            return variable
        x = _constrained(variable.get_value(), padding, mesh)
        x = lengthened(x, padding.dim, padding.size)
        return variable.copy(_constrained(x, padding, mesh))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def exact(tree: Any, mesh: Any) -> Any:
    """Returns variables without their padding, in traced code.

    A device's part keeps its size, with less of it in use, so that nothing moves.
    ``mesh`` may be None for values on the host, or abstract ones.
    """

    def one(variable: Any) -> Any:
        if (padding := padding_now(variable)) is None:
            return variable
        x = shortened(variable.get_value(), padding.dim, padding.shape[padding.dim])
        return variable.copy(_constrained(x, padding, mesh))

    return jax.tree.map(one, tree, is_leaf=is_variable)


def exact_values(variable: nnx.Variable) -> nnx.Variable:
    """Returns a variable without its padding and the mark of it."""
    if padding_now(variable):
        variable = exact(variable, None)
        variable.del_metadata(PADDING)
    return variable


def shortened(x: Any, dim: int, size: int) -> Any:
    """Returns the first ``size`` of a dimension, counted from the end."""
    return x[(..., slice(size), *[slice(None)] * (-1 - dim))]


def lengthened(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Returns an array padded with zeros to ``size`` along a dimension."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, size - x.shape[dim])
    return jnp.pad(x, widths)


def _ends(variable: nnx.Variable, shape: tuple[int, ...]) -> bool:
    """Returns whether the shape ends with that of one layer.

    What an optimizer keeps has layer dimensions that its metadata may not count, or is
    several arrays, which are not padded.
    """
    found = getattr(variable.get_value(), "shape", ())
    return len(found) >= len(shape) and found[len(found) - len(shape) :] == shape


def exact_types(tree: Any) -> Any:
    """Returns a tree's abstract values, without shardings and padding."""
    return jax.eval_shape(lambda tree: exact(tree, None), tree)


def _constrained(x: jax.Array, padding: Padding, mesh: Any) -> jax.Array:
    if mesh is None:
        return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[padding.dim] = padding.axes
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
