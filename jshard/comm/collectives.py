"""All-gathers of parameters and their transposes, with the dtypes on the wire.

Everything here runs inside ``shard_map``: an array is one device's local part, and its
type says over which mesh axes it varies. A gradient has the type of its parameter, so
it is summed over exactly those axes over which the parameter does *not* vary, on HSDP
meshes too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jshard.comm import quantized
from jshard.comm.varying import abstract_like, is_float, vary, varying
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.mesh import FSDP, manual_axes, shard_axes
from jshard.precision import is_quantized
from jshard.scopes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if dtype is None or not is_float(x) else x.astype(dtype)


@jax.named_scope(ALL_GATHER)
def all_gather(
    shard: jax.Array, place: Placement, scale: jax.Array | None = None
) -> jax.Array:
    """Returns the full parameter in the layer's dtype, from this device's shard.

    With a scale it is in float8 instead, divided by the scale.
    """
    shard = place.fetched(vary(shard))
    if scale is not None:
        values = quantized.to_float8(shard, scale, place.gather)
        for dim, axes in _gathers(place, values.ndim):
            values = quantized.gather_float8(values, dim, axes)
        return values
    quantize = is_quantized(place.gather) and is_float(shard)
    full = shard if is_quantized(place.gather) else _cast(shard, place.gather)
    for dim, axes in _gathers(place, full.ndim):
        if quantize:
            full = quantized.all_gather(full, dim, place.gather, axes)
        else:
            full = lax.all_gather(full, axes, axis=dim, tiled=True)
    return on_first(_cast(full, place.compute), place)


def _gathers(place: Placement, ndim: int) -> list[tuple[int, Any]]:
    """Returns (dimension, axes) of each all-gather that a layer's weight takes."""
    over = [(place.dim, place.axes())] if place.shards() > 1 else []
    split = [(dim, axis) for dim, axis in place.splits if place.whole]
    return [(ndim + dim, axes) for dim, axes in [*over, *split] if dim is not None]


def on_first(x: jax.Array, place: Placement) -> jax.Array:
    """Returns zeros unless this is the first device along ``place.on_first``.

    Weights and their gradients are treated alike.
    """
    if place.on_first is None or place.whole:
        return x
    return jnp.where(lax.axis_index(place.on_first) == 0, x, jnp.zeros_like(x))


def split(full: jax.Array, place: Placement, group: int) -> jax.Array:
    """Returns this device's part of a full parameter, split over ``group`` neighbours.

    The part has the dtype on the wire where that is smaller. The values were gathered
    in that dtype, so this is lossless. Quantized dtypes are not used: the blocks of a
    part would have other scales.
    """
    if place.dim is None:
        return full
    dim, group = full.ndim + place.dim, min(group, place.shards())
    size = full.shape[dim] // group
    start = lax.axis_index(place.axes()) % group * size
    part = lax.dynamic_slice_in_dim(full, start, size, dim)
    if place.gather is None or is_quantized(place.gather):
        return part
    smaller = jnp.dtype(place.gather).itemsize < part.dtype.itemsize
    return _cast(part, place.gather) if smaller else part


@jax.named_scope(ALL_GATHER)
def join(part: jax.Array, place: Placement, group: int) -> jax.Array:
    """The inverse of ``split``: an all-gather within each group."""
    if place.dim is None:
        return part
    dim, axes, group = part.ndim + place.dim, place.axes(), min(group, place.shards())
    groups = np.arange(place.shards()).reshape(-1, group).tolist()
    if group > 1 and place.scale is not None:
        part = quantized.gather_float8(part, dim, axes, groups)
    elif group > 1:
        part = lax.all_gather(
            part, axes, axis=dim, axis_index_groups=groups, tiled=True
        )
    return _cast(part, place.compute)


def reduce_scatter(
    grad: jax.Array, place: Placement, shard: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns the gradient of this device's shard, from that of the full parameter.

    A reduce-scatter over "fsdp", then an all-reduce of the shard over "replica" (not if
    the shard varies there: such gradients accumulate before they are reduced). The
    gradient of a replicated parameter is only all-reduced. Of ``shard`` only dtype and
    mesh type are read.
    """
    return all_reduce(scatter(grad, place), shard)


@jax.named_scope(REDUCE_SCATTER)
def scatter(grad: jax.Array, place: Placement) -> jax.Array:
    """The first half of ``reduce_scatter``: sums a sharded parameter over "fsdp"."""
    grad = on_first(_cast(grad, place.reduce), place)
    if place.dim is None or place.shards() == 1:
        return grad
    dim, axes = grad.ndim + place.dim, place.axes()
    if place.sum in (None, grad.dtype):
        return lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    return _reduce_scatter_in(grad, dim, axes, place.sum)


@jax.named_scope(ALL_REDUCE)
def all_reduce(grad: jax.Array, shard: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The second half of ``reduce_scatter``: sums over axes ``shard`` does not vary on.

    The result has the dtype and the mesh type of ``shard``.
    """
    have, want = varying(grad), varying(shard)
    summed = tuple(axis for axis in manual_axes() if axis in have - want)
    grad = lax.psum(grad, summed) if summed else grad
    return vary(grad.astype(shard.dtype), tuple(want))


def _reduce_scatter_in(grad: jax.Array, dim: int, axes: Any, dtype: Any) -> jax.Array:
    """A reduce-scatter that sums in ``dtype``: an all-to-all and a local sum."""
    shape, devices = grad.shape, lax.axis_size(axes)
    shape = (*shape[:dim], devices, shape[dim] // devices, *shape[dim + 1 :])
    grad = grad.reshape(shape)
    parts = lax.all_to_all(grad, axes, split_axis=dim, concat_axis=dim)
    return jnp.sum(parts, axis=dim, dtype=dtype)


def gather_leaf(shard: jax.Array, place: Placement) -> jax.Array:
    """``all_gather`` whose transpose is ``reduce_scatter``, each in its own dtype."""
    abstract = abstract_like(shard)

    @jax.custom_vjp
    def run(shard):
        return all_gather(shard, place)

    def backward(_, grad):
        return (reduce_scatter(grad, place, abstract),)

    run.defvjp(lambda shard: (run(shard), None), backward)
    return run(shard)


def placements(
    specs: Any, params: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """Returns a Placement for each leaf of a plain pytree.

    ``specs`` has the structure of ``params`` and includes a stack's layer dimension.
    """
    sharded = shard_axes()

    def place(param: Any, spec: PartitionSpec) -> Placement:
        dims = [i for i, axis in enumerate(spec) if axis == sharded]
        if not dims and FSDP in spec:
            raise UserError(
                f"specs: {spec} on a mesh with a context axis; parameters are sharded "
                f"over both axes, so name {sharded} in place of {FSDP!r}"
            )
        dim = dims[0] - len(param.shape) if dims else None
        return Placement(dim, gather=dtype, reduce=reduce_dtype)

    return jax.tree.map(place, params, specs)


def gather(
    params: Any, specs: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """All-gathers a pytree of shards; the transpose is a reduce-scatter.

    For use inside ``shard_map`` over a mesh with an "fsdp" axis.

    Args:
      params: pytree of local shards.
      specs: a PartitionSpec for each leaf; the dimension named "fsdp" is gathered,
        a leaf without one is returned unchanged, and its gradient is all-reduced.
      dtype: dtype on the wire and of the result; None keeps the parameter's.
      reduce_dtype: dtype of the reduction; None keeps the gradient's.

    Returns:
      The same tree with full arrays.
    """
    places = placements(specs, params, dtype=dtype, reduce_dtype=reduce_dtype)
    return jax.tree.map(gather_leaf, params, places)


def pmean(x: Any) -> Any:
    """Returns the mean over all devices of a step, or ``x`` itself outside a mesh.

    Use it for statistics over the global batch (batch norm, load balance).
    """
    axes = manual_axes()
    if not axes:
        return x
    return jax.tree.map(lambda v: lax.pmean(vary(v), axes), x)
