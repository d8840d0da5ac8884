"""Sharding without modules: gathers and scans of plain pytrees, on meshes of your own.

docs/how_to/without_flax.md says what these functions are for, with an example.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.cpu.order import in_order
from jshard.sharding.layout.placement import Gradient, Placement, Sharding, Weight
from jshard.sharding.settings.mesh import FSDP, manual_axes, names_of, shard_axes
from jshard.sharding.settings.policy import Reshard, UnitPolicy
from jshard.sharding.settings.precision import is_float
from jshard.sharding.units.stack import make_scan, split_aux
from jshard.system.compat.jaxprs import Static, is_typed
from jshard.system.errors import UserError

__all__ = ["gather", "in_order", "scan_layers"]


def gather(
    params: Any, specs: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """All-gathers a pytree of shards; the transpose is a reduce-scatter.

    For use inside ``shard_map(check_vma=False)`` over a mesh with an "fsdp" axis.
    Take derivatives inside it, too: the gradient of each leaf is then complete, the sum
    of all devices' gradients.

    Args:
      params: pytree of local shards.
      specs: a PartitionSpec for each leaf; the dimension named "fsdp" is gathered,
        a leaf without one is returned unchanged, and its gradient is all-reduced.
      dtype: dtype on the wire and of the result; None keeps the parameter's.
      reduce_dtype: dtype of the reduction; None keeps the gradient's.

    Returns:
      The same tree with full arrays.
    """
    places = _placements(specs, params, dtype=dtype, reduce_dtype=reduce_dtype)
    return jax.tree.map(all_gather, params, places)


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
    places = _placements(specs, stacked_params, dtype=dtype, reduce_dtype=reduce_dtype)
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


def _placements(
    specs: Any, params: Any, *, dtype: Any = None, reduce_dtype: Any = None
) -> Any:
    """Returns a Placement for each leaf of a plain pytree.

    ``specs`` has the structure of ``params`` and includes a stack's layer dimension.
    """
    sharded = shard_axes()
    if any(map(is_typed, jax.tree.leaves(params))):
        raise UserError(
            "jshard.functional.gather and scan_layers write the sums over devices out; "
            "call them, and differentiate, inside jax.shard_map(..., check_vma=False)"
        )

    def place(param: Any, spec: PartitionSpec) -> Placement:
        dims = [i for i, axis in enumerate(spec) if axis == sharded]
        if not dims and FSDP in spec:
            raise UserError(
                f"specs: {spec} on a mesh with a context axis; parameters are sharded "
                f"over both axes, so name {sharded} in place of {FSDP!r}"
            )
        dim = dims[0] - len(param.shape) if dims else None
        others = set(manual_axes()) - set(names_of(sharded) if dims else ())
        real = jnp.issubdtype(param.dtype, jnp.floating)
        return Placement(
            Sharding(dim),
            weight=Weight(
                gather=dtype if real else None, compute=dtype if real else None
            ),
            gradient=Gradient(
                reduce=reduce_dtype if real else None,
                sum_over=tuple(axis for axis in manual_axes() if axis in others),
                sum_at="unit",
                trainable=is_float(param),
            ),
        )

    return jax.tree.map(place, params, specs)
