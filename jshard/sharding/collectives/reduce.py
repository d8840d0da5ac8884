"""Sums over devices: the transposes of gathers, and means.

The gradient of a full weight is that of one device's examples. ``scatter`` sums it over
the axes that shard the parameter, and ``all_reduce`` over those on which devices have
the same shard.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.collectives.counted import counts_here
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.mesh import manual_axes
from jshard.sharding.settings.scopes import ALL_REDUCE, COUNTED, REDUCE_SCATTER


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x`` in a dtype, or as it is for None."""
    return x if dtype is None else x.astype(dtype)


def on_rank_zero(x: jax.Array, place: Placement) -> jax.Array:
    """Returns zeros unless this is the first device along ``place.part.on_rank_zero``.

    Weights and their gradients are treated alike.
    """
    if place.part.on_rank_zero is None or place.part.whole:
        return x
    return jnp.where(lax.axis_index(place.part.on_rank_zero) == 0, x, jnp.zeros_like(x))


@jax.named_scope(REDUCE_SCATTER)
def scatter(grad: jax.Array, place: Placement) -> jax.Array:
    """Sums the gradient of a full parameter over the devices that shard it.

    Each device gets the part of its shard. A replicated parameter's gradient is only
    cast.
    """
    grad = on_rank_zero(cast(grad, place.gradient.reduce), place)
    if place.sharding.dim is None:
        return grad
    grad, dim = place.with_padding(grad), grad.ndim + place.sharding.dim
    if place.shards() == 1:
        return grad
    for axes in place.axes_in_turn(grad.nbytes):
        if place.gradient.sum in (None, grad.dtype):
            grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        else:
            grad = _reduce_scatter_in(grad, dim, axes, place.gradient.sum)
    return grad


@jax.named_scope(ALL_REDUCE)
def all_reduce(grad: jax.Array, place: Placement) -> jax.Array:
    """Sums a shard's gradient over the devices that have the same shard.

    It is sent in the dtype of the sum.
    """
    if place.gradient.sum is not None:
        grad = grad.astype(jnp.promote_types(grad.dtype, place.gradient.sum))
    return lax.psum(grad, place.gradient.sum_over) if place.gradient.sum_over else grad


def all_reduce_in_unit(grad: jax.Array, place: Placement, dtype: Any) -> jax.Array:
    """Returns ``all_reduce`` if the unit does it, else ``grad``, in the shard's dtype.

    Otherwise the step sums what all of its backwards have added up.
    """
    if place.gradient.sum_at == "unit":
        grad = all_reduce(grad, place)
    return grad.astype(dtype)


def _reduce_scatter_in(grad: jax.Array, dim: int, axes: Any, dtype: Any) -> jax.Array:
    """A reduce-scatter that sums in ``dtype``: an all-to-all and a local sum."""
    shape, devices = grad.shape, lax.axis_size(axes)
    shape = (*shape[:dim], devices, shape[dim] // devices, *shape[dim + 1 :])
    grad = grad.reshape(shape)
    parts = lax.all_to_all(grad, axes, split_axis=dim, concat_axis=dim)
    return jnp.sum(parts, axis=dim, dtype=dtype)


def pmean(x: Any) -> Any:
    """Returns the mean over all devices of a step, or ``x`` itself outside a mesh.

    Use it for statistics over the global batch (batch norm, load balance). Devices
    whose example does not count (``FSDP.eval_step(examples=)``) are left out.
    """
    axes, counts = manual_axes(), counts_here()
    if not axes:
        return x
    if counts is None:
        return jax.tree.map(lambda v: lax.pmean(v, axes), x)
    with jax.named_scope(COUNTED):
        number = lax.psum(jnp.where(counts, 1, 0), axes)
        mean = lambda v: lax.psum(jnp.where(counts, v, 0), axes) / number
        return jax.tree.map(mean, x)
