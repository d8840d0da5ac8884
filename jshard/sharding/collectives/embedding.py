"""Embedding look-ups in a table that is sharded along its columns.

The table is not gathered. Each device looks up its columns for the tokens of all
devices, and an all-to-all brings each device the complete rows of its own tokens. If a
device has fewer tokens than the table has rows, this moves fewer bytes than a gather,
and no device holds the full table or its full gradient.

Shape suffixes: T tokens of one device, A tokens of all devices on the fsdp axis, V rows
of the table, D columns of the table, C columns on one device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.collectives.reduce import all_reduce_in_unit
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.mesh import REPLICA, shard_axes
from jshard.sharding.settings.precision import is_quantized
from jshard.sharding.settings.scopes import LOOK_UP


def is_cheaper(shard_VC: jax.Array, place: Placement, ids: Any) -> bool:
    """Returns whether exchanging the rows of ``ids`` moves fewer bytes than a gather.

    The answer is False unless columns are sharded and ``ids`` is an integer array.
    """
    devices = lax.axis_size(shard_axes())
    if place.sharding.dim != -1 or devices == 1:
        return False
    if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.integer):
        return False
    rows, columns = shard_VC.shape[0], devices * shard_VC.shape[1]
    gathered = rows * columns * (place.weight.gather or shard_VC.dtype).itemsize
    row = (
        columns
        * _narrower(
            place.weight.compute or shard_VC.dtype, place.weight.gather
        ).itemsize
    )
    return ids.size * (row + devices * ids.dtype.itemsize) < gathered


def look_up(
    read: Callable[[jax.Array, jax.Array], jax.Array],
    shard_VC: jax.Array,
    place: Placement,
    ids: jax.Array,
) -> jax.Array:
    """Looks up rows of a table whose columns are sharded.

    Values are those of a gathered table in the dtypes of ``place.weight``, but never
    quantized. Gradients are sent token by token, in their own dtype or in
    ``place.gradient.reduce`` if that is narrower, and summed in at least float32.

    ``read(table, ids)`` looks up rows in a table of any number of columns; ``ids`` are
    (...) integers, this device's tokens. The result is (..., D), in its dtype.
    """
    shape, dtype = shard_VC.shape, shard_VC.dtype
    devices = lax.axis_size(shard_axes())

    @jax.custom_vjp
    def run(shard_VC, ids_T):
        return forward(shard_VC, ids_T)[0]

    @jax.named_scope(LOOK_UP)
    def forward(shard_VC, ids_T):
        # XLA would combine an all-gather with those of weights and wait for them.
        ids_A = lax.all_to_all(jnp.tile(ids_T, devices), shard_axes(), 0, 0, tiled=True)
        table_VC = place.fetched(shard_VC)
        if place.weight.gather is not None and not is_quantized(place.weight.gather):
            table_VC = table_VC.astype(place.weight.gather)
        table_VC = table_VC.astype(place.weight.compute or table_VC.dtype)
        rows_AC = read(table_VC, ids_A)
        sent_AC = rows_AC.astype(_narrower(rows_AC.dtype, place.weight.gather))
        rows_TD = lax.all_to_all(sent_AC, shard_axes(), 0, 1, tiled=True)
        rows_TD = place.without_padding(rows_TD)
        return rows_TD.astype(rows_AC.dtype), ids_A

    @jax.named_scope(LOOK_UP)
    def backward(ids_A, grad_TD):
        if not place.gradient.trainable:
            return None, None
        grad_TD = grad_TD.astype(_narrower(grad_TD.dtype, place.gradient.reduce))
        grad_TD = place.with_padding(grad_TD)
        grad_AC = lax.all_to_all(grad_TD, shard_axes(), 1, 0, tiled=True)
        wide = jnp.promote_types(grad_AC.dtype, jnp.float32)
        grad_VC = jnp.zeros(shape, wide).at[ids_A].add(grad_AC.astype(wide))
        # The all-reduce over replicas, if there is one, has the dtype of gradients.
        if place.gradient.sum_at == "unit" and lax.axis_size(REPLICA) > 1:
            grad_VC = grad_VC.astype(
                place.gradient.sum or place.gradient.reduce or grad_AC.dtype
            )
        return all_reduce_in_unit(grad_VC, place, dtype), None

    run.defvjp(forward, backward)
    return run(shard_VC, jnp.ravel(ids)).reshape(*ids.shape, -1)


def _narrower(dtype: Any, wanted: Any) -> Any:
    """Returns ``wanted`` if it is a narrower dtype than ``dtype``, else ``dtype``."""
    if wanted is None or is_quantized(wanted) or wanted.itemsize >= dtype.itemsize:
        return jnp.dtype(dtype)
    return wanted
