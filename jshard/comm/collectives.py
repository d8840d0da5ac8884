"""All-gathers of parameters and their transposes, with the dtypes on the wire.

Everything here runs inside ``shard_map``: an array is one device's local part, and
its type says over which mesh axes it varies. A gradient has
the type of its parameter, so reducing it over exactly the axes its parameter does
*not* vary over is always right, on hybrid meshes too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jshard.comm import quantized
from jshard.comm.varying import abstract_like, is_float, vary, varying
from jshard.layout.placement import Placement
from jshard.mesh import FSDP, manual_axes


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None or not is_float(x) else x.astype(dtype)


def all_gather(shard: jax.Array, place: Placement) -> jax.Array:
    """The full parameter from one device's shard, in the layer's dtype."""
    shard = place.fetched(vary(shard))
    in_one_byte = quantized.is_quantized(place.gather)
    full = shard if in_one_byte else _cast(shard, place.gather)
    if place.dim is not None and lax.axis_size(FSDP) > 1:
        dim = full.ndim + place.dim
        if in_one_byte and is_float(shard):
            full = quantized.all_gather(shard, dim, place.gather)
        else:
            full = lax.all_gather(full, FSDP, axis=dim, tiled=True)
    return _cast(full, place.compute)


def split(full: jax.Array, place: Placement, group: int) -> jax.Array:
    """This device's part of a gathered parameter, split over ``group`` neighbours.

    It is in the dtype of the wire again, where that is the smaller one: it came from
    there, so nothing is lost. (Blocks that are scaled would be others in a part.)
    """
    if place.dim is None:
        return full
    dim = full.ndim + place.dim
    size = full.shape[dim] // group
    start = lax.axis_index(FSDP) % group * size
    part = lax.dynamic_slice_in_dim(full, start, size, dim)
    if place.gather is None or quantized.is_quantized(place.gather):
        return part
    smaller = jnp.dtype(place.gather).itemsize < part.dtype.itemsize
    return _cast(part, place.gather) if smaller else part


def join(part: jax.Array, place: Placement, group: int) -> jax.Array:
    """The full parameter from the parts of ``split``, gathered in its group alone."""
    if place.dim is None:
        return part
    groups = np.arange(lax.axis_size(FSDP)).reshape(-1, group).tolist()
    dim = part.ndim + place.dim
    if group > 1:
        part = lax.all_gather(
            part, FSDP, axis=dim, axis_index_groups=groups, tiled=True
        )
    return _cast(part, place.compute)


def reduce_scatter(
    grad: jax.Array, place: Placement, shard: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """The gradient of one device's shard from that of the full parameter.

    Summed over "fsdp" by a reduce-scatter and then, as a shard, over "replica" unless
    the parameter itself varies there (a gradient that is accumulated before it is
    summed). A replicated parameter is all-reduced where it is invariant.

    Args:
      grad: this device's gradient of the gathered parameter.
      place: the parameter's placement.
      shard: the shard (only its dtype and mesh type are read).
    """
    return sum_copies(scatter(grad, place), shard)


def scatter(grad: jax.Array, place: Placement) -> jax.Array:
    """The first half of ``reduce_scatter``: the sum over "fsdp", of sharded ones."""
    grad = _cast(grad, place.reduce)
    if place.dim is None or lax.axis_size(FSDP) == 1:
        return grad
    dim = grad.ndim + place.dim
    if place.sum in (None, grad.dtype):
        return lax.psum_scatter(grad, FSDP, scatter_dimension=dim, tiled=True)
    return _sum_of_parts(grad, dim, place.sum)


def sum_copies(grad: jax.Array, shard: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The second half: sums over what ``shard`` does not vary over, in its dtype."""
    have, want = varying(grad), varying(shard)
    summed = tuple(axis for axis in manual_axes() if axis in have - want)
    grad = lax.psum(grad, summed) if summed else grad
    return vary(grad.astype(shard.dtype), tuple(want))


def _sum_of_parts(grad: jax.Array, dim: int, dtype: Any) -> jax.Array:
    """A reduce-scatter that adds up in ``dtype``: each device sums what all send it."""
    shape, devices = grad.shape, lax.axis_size(FSDP)
    shape = (*shape[:dim], devices, shape[dim] // devices, *shape[dim + 1 :])
    parts = lax.all_to_all(grad.reshape(shape), FSDP, split_axis=dim, concat_axis=dim)
    return jnp.sum(parts, axis=dim, dtype=dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A residual that is no array."""

    value: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_leaf(shard: jax.Array, place: Placement) -> jax.Array:
    """``all_gather`` whose transpose is ``reduce_scatter``, each in its own dtype."""
    return all_gather(shard, place)


def _gather_forward(shard, place):
    return gather_leaf(shard, place), (_Static(abstract_like(shard)),)


def _gather_backward(place, saved, grad):
    return (reduce_scatter(grad, place, saved[0].value),)


gather_leaf.defvjp(_gather_forward, _gather_backward)


def placements(
    specs: Any, params: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """Placements of a plain pytree from PartitionSpecs of the same structure.

    The specs count the dimensions of ``params`` as given, a stack's layer dimension
    included.
    """

    def place(param: Any, spec: PartitionSpec) -> Placement:
        dims = [i for i, axis in enumerate(spec) if axis == FSDP]
        dim = dims[0] - len(param.shape) if dims else None
        return Placement(dim, gather=dtype, reduce=reduce_dtype)

    return jax.tree.map(place, params, specs)


def gather(
    params: Any, specs: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """All-gathers a pytree of shards; its gradient leaves as reduce-scatters.

    For use inside ``shard_map`` over a mesh with an "fsdp" axis.

    Args:
      params: pytree of local shards.
      specs: a PartitionSpec for each leaf; the dimension named "fsdp" is gathered,
        a leaf without one is returned as it is and its gradient is all-reduced.
      dtype: dtype on the wire and of the result; None keeps the parameter's.
      reduce_dtype: dtype of the reduction; None keeps the gradient's.

    Returns:
      The same tree with full shapes.
    """
    places = placements(specs, params, dtype=dtype, reduce_dtype=reduce_dtype)
    return jax.tree.map(gather_leaf, params, places)


def pmean(x: Any) -> Any:
    """Mean over all devices of a step; the identity outside a mesh.

    Use it for statistics over the whole batch (batch norm, load balance).
    """
    axes = manual_axes()
    if not axes:
        return x
    return jax.tree.map(lambda v: lax.pmean(vary(v), axes), x)
