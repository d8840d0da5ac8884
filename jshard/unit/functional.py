"""The functional core for models that are no Flax NNX modules: ``scan_layers``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jshard.comm.collectives import placements
from jshard.comm.varying import vary
from jshard.policy import Reshard, UnitPolicy, check_remat
from jshard.unit.loop_types import typed_loops
from jshard.unit.partition import Static
from jshard.unit.stack import make_scan, split_aux
from jshard.unit.unit import Parameters


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

    For use inside ``shard_map`` over a mesh with an "fsdp" axis, on plain pytrees.

    Args:
      fn: ``fn(params, carry, *args)`` of one layer with full weights, returning the
        new carry, or ``(carry, aux)``.
      stacked_params: pytree of local shards, (L, ...) each.
      carry: pytree of arrays that goes from layer to layer.
      *args: pytrees of arrays, the same for every layer.
      specs: a PartitionSpec for each leaf of ``stacked_params``, layer dimension
        included.
      remat: what the backward keeps; see ``Policy.remat``.
      reshard_after_forward: whether weights are gathered again for the backward; a
        number keeps them sharded over groups of so many devices until then.
      dtype: dtype on the wire of the gathers and of the weights ``fn`` sees.
      reduce_dtype: dtype of the gradients' reduction.

    Returns:
      The last carry, or ``(carry, aux)`` with aux stacked.

    Raises:
      UserError: the carry changes its shape or dtype, or ``remat`` is not known.
    """
    check_remat(remat)
    places = placements(specs, stacked_params, dtype=dtype, reduce_dtype=reduce_dtype)
    shards, params_tree = jax.tree.flatten(stacked_params)
    places = jax.tree.leaves(places)
    carry, args = jax.tree.map(jnp.asarray, (carry, args))
    leaves, args_tree = jax.tree.flatten(args)

    def layer(weights, _, carry, leaves):
        params = jax.tree.unflatten(params_tree, weights)
        args = jax.tree.unflatten(args_tree, leaves)
        after, aux, has_aux = split_aux(fn(params, carry, *args), carry)
        return after, (aux, Static(has_aux))

    own = Parameters(
        [vary(s) if p.dim is None else s for s, p in zip(shards, places, strict=True)],
        places,
    )
    policy = UnitPolicy(remat, reshard_after_forward=reshard_after_forward)
    with typed_loops():
        run, inputs = make_scan(layer, own, [], carry, leaves, policy, Parameters())
        carry, (aux, has_aux), _ = run(*inputs)
    return (carry, aux) if has_aux.value else carry
