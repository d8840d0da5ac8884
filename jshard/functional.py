"""Sharding without modules: gathers and scans of plain pytrees, on meshes of your own.

What they are for, with an example: docs/how_to/without_flax.md.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jshard.collectives.gather import gather, placements
from jshard.compat.jaxprs import Static
from jshard.cpu.order import in_order
from jshard.fsdp.policy import Reshard, UnitPolicy
from jshard.unit.stack import make_scan, split_aux

__all__ = ["gather", "in_order", "scan_layers"]


def scan_layers(
    fn: Callable[..., Any],
    stacked_params: Any,
    carry: Any,
    *args: Any,
    specs: Any,
    remat: Any = "full",
    reshard_after_forward: Reshard = True,
    dtype: Any = None,
    reduce_dtype: Any = None,
) -> Any:
    """Applies stacked layers to ``carry``, gathering one layer's weights at a time.

    For plain pytrees, inside ``shard_map(check_vma=False)`` over a mesh with an "fsdp"
    axis. Take derivatives inside it, too: gradients of ``stacked_params`` are then
    complete, and those of ``carry`` and ``args`` are this device's own.

    Args:
      fn: ``fn(params, carry, *args)``: one layer with full weights, which returns the
        new carry or ``(carry, aux)``.
      stacked_params: pytree of local shards, (L, ...) each.
      carry: pytree of arrays, the input of the first layer.
      *args: pytrees of arrays that all layers share.
      specs: a PartitionSpec for each leaf of ``stacked_params``, layer dimension
        included.
      remat: which activations are kept for the backward; see ``Policy.remat``.
      reshard_after_forward: whether weights are gathered again for the backward; a
        number keeps them sharded over groups of that many devices instead.
      dtype: dtype of gathers on the wire, and of the weights that ``fn`` receives.
      reduce_dtype: dtype of the reduction of gradients.

    Returns:
      The last carry, or ``(carry, aux)`` with aux stacked.

    Raises:
      UserError: a layer changes the carry's shape or dtype, or ``remat`` is unknown.
    """
    policy = UnitPolicy(remat, reshard_after_forward=reshard_after_forward)
    places = placements(specs, stacked_params, dtype=dtype, reduce_dtype=reduce_dtype)
    shards, params_tree = jax.tree.flatten(stacked_params)
    places = jax.tree.leaves(places)
    carry, args = jax.tree.map(jnp.asarray, (carry, args))
    leaves, args_tree = jax.tree.flatten(args)

    def layer(weights, _, carry, leaves):
        params = jax.tree.unflatten(params_tree, weights)
        args = jax.tree.unflatten(args_tree, leaves)
        after, aux, has_aux = split_aux(fn(params, carry, *args), carry)
        return (after, aux), [], Static(has_aux)

    run = make_scan(layer, shards, places, [], carry, leaves, policy)
    carry, (aux, _, has_aux), _ = run()
    return (carry, aux) if has_aux.value else carry
