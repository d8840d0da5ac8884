"""Remat policies: which of a layer's activations are kept for the backward."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jshard.compat.jaxprs import nested
from jshard.errors import UserError
from jshard.fsdp.activations import ATTENTION_OPERANDS, INPUTS, Names, Offload
from jshard.fsdp.policy import Policy


def check_names(jaxpr: core.Jaxpr, policy: Policy) -> None:
    """Checks that each name in a remat policy is that of some activation.

    Raises:
      UserError: a policy names an activation that the program does not have.
    """
    remats = list(policy.everywhere("remat").values())
    named = [remat.names for remat in remats if isinstance(remat, Names)]
    wanted = {name for names in named for name in names}
    if any(isinstance(remat, Offload) for remat in remats):
        wanted.discard(INPUTS)
    found = set(names_in(jaxpr)) if wanted else set()
    if unknown := sorted(wanted - found):
        raise UserError(
            f"policy.remat: no activation is named {', '.join(map(repr, unknown))} "
            "(with jax.ad_checkpoint.checkpoint_name); named are: "
            f"{', '.join(sorted(found)) or 'none'}"
        )


def names_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the names of a jaxpr's activations, from ``checkpoint_name`` of JAX."""
    for eqn in nested(jaxpr.eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]


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
    return kept or (primitive.name != "name" and keeps(primitive, *args, **params))


def checkpoint(fn: Callable, remat: Any, *, prevent_cse: bool) -> Callable:
    """Applies the remat policy ``remat`` to a layer function."""
    if remat == "none":
        return fn
    policies, policy = jax.checkpoint_policies, remat
    if isinstance(remat, Names):
        policy = policies.save_only_these_names(*remat.names)
    elif isinstance(remat, str):
        keeps = {"attention": _attention, "dots": _products}
        policy = keeps[remat] if remat != "full" else policies.nothing_saveable
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)
