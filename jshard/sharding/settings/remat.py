"""What each remat policy keeps of a layer for its backward."""

from collections.abc import Callable
from typing import Any

import jax

from jshard.sharding.settings.policy import ATTENTION_OPERANDS, Names


def checkpoint(fn: Callable, remat: Any, *, prevent_cse: bool) -> Callable:
    """Applies the remat policy ``remat`` to a layer function."""
    if remat == "none":
        return fn
    policies, policy = jax.checkpoint_policies, remat
    if isinstance(remat, Names):
        policy = policies.save_only_these_names(*remat.names)
    elif isinstance(remat, str):
        nothing = policies.nothing_saveable
        policy = {"full": nothing, "attention": _attention, "dots": _products}[remat]
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def _attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps flash attention: its output, the softmax's statistics, and its operands.

    Operands are kept as the kernel reads them, instead of the products before them.
    """
    if primitive.name == "name":
        return params["name"] == ATTENTION_OPERANDS
    return primitive.name.startswith("dot_product_attention_fwd")  # cuDNN's


def _products(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keeps products with weights, and flash attention, which is two products."""
    keeps = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    kept = _attention(primitive, *args, **params)
    kept |= primitive.name == "block_scaled_dot"
    return kept or (primitive.name != "name" and keeps(primitive, *args, **params))
