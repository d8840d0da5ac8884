"""Checks of what a user hands to FSDP, with errors that say what to do."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard.errors import UserError
from jshard.layout.layers import layer_dims
from jshard.layout.layout import Layout
from jshard.layout.variables import variables
from jshard.mesh import FSDP, REPLICA
from jshard.policy import Policy
from jshard.state import TrainState
from jshard.unit.modules import Stack, root_variables

# What a model's calls change, or draw from: nothing to take gradients of.
_STATE = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)


def check_trained(params: nnx.State) -> None:
    """Raises UserError unless ``params`` are trainable, and there are some."""
    if not jax.tree.leaves(params):
        raise UserError(
            "the model has no parameters that wrt selects; nothing can be trained"
        )
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(map(str, path))
        if not isinstance(variable, nnx.Variable) or isinstance(variable, _STATE):
            raise UserError(
                f"wrt selects {name!r}, a {type(variable).__name__}; it must select "
                "nnx.Param variables, or types of your own that hold weights"
            )
        for value in jax.tree.leaves(variable):
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise UserError(
                    f"wrt selects {name!r} of {value.dtype}; only floating-point "
                    "parameters can be trained"
                )


def check_units(model: nnx.Module, units: Sequence[type]) -> None:
    """Raises UserError where a type of ``units`` is that of no submodule."""
    modules = list(nnx.iter_modules(model))
    inside = [module for path, module in modules if path]
    for unit in units:
        if any(isinstance(module, unit) for module in inside):
            continue
        types = sorted({_type_name(module) for module in inside})
        found = ", ".join(types[:12]) or "none"
        more = f" and {len(types) - 12} more" if len(types) > 12 else ""
        what = (
            f"only the model itself is a {unit.__name__}, and what is in no unit is "
            "gathered once, whole"
            if isinstance(model, unit)
            else f"the model has no {unit.__name__}"
        )
        raise UserError(f"units: {what}; its submodules are of types {found}{more}")


def _type_name(module: nnx.Module) -> str:
    return getattr(type(module), "plain_class", type(module)).__name__


def check_layer_counts(policy: Policy, model: nnx.Module) -> None:
    """Raises UserError where ``policy`` counts layers of a Stack that are not there."""
    stacks = [m for _, m in nnx.iter_modules(model) if isinstance(m, Stack)]
    sizes = [
        n for _, v in variables(model) for n in np.shape(v.get_value())[: layer_dims(v)]
    ]
    most = max(sizes, default=0)
    overrides = policy.overrides.items()
    for where, fields in [
        ("", {"first_k": policy.first_k, "keep_last": policy.keep_last}),
        *((f"overrides[{pattern!r}].", fields) for pattern, fields in overrides),
    ]:
        for name in ("first_k", "keep_last"):
            count = fields.get(name)
            if not stacks and (count or (name == "first_k" and count is not None)):
                raise UserError(
                    f"policy.{where}{name} counts the layers of a jshard.Stack, and "
                    "the model has none; name its Units in policy.overrides, with "
                    "remat or reshard_after_forward"
                )
            if count and count > most:
                raise UserError(
                    f"policy.{where}{name}={count} is more layers than the model has: "
                    f"its largest Stack has {most}"
                )


def warn_of_large_root(model: nnx.Module, state: TrainState, layout: Layout) -> None:
    """Warns where much of a model, given with its Units, is in none of them."""
    root = [
        (path, variable)
        for path, variable in root_variables(model, state.params, state.frozen)
        if layout.places[path].dim is not None
    ]
    size = {path: np.prod(np.shape(v.get_value())) for path, v in root}
    params = jax.tree.leaves((state.params, state.frozen))
    total = sum(np.prod(x.shape) for x in params)
    if sum(size.values()) > total / 4 and layout.mesh.shape[FSDP] > 1:
        largest = sorted(root, key=lambda item: -size[item[0]])[:3]
        names = ", ".join(".".join(map(str, path)) for path, _ in largest)
        warnings.warn(
            f"{sum(size.values()) / total:.0%} of the parameters are in no Stack "
            "or Unit, so they are gathered at the start of a step and kept: wrap "
            f"the modules of {names} in jshard.Unit, or name their types in units=",
            stacklevel=4,  # the caller of FSDP.init
        )


def check_batch(
    batch: Any, mesh: Mesh, *, accumulate: int = 1, processes: int = 1
) -> None:
    """Raises UserError unless the examples divide by devices and micro-batches.

    Args:
      batch: the global batch, or the part of one of the ``processes``.
      mesh: what it is sharded over.
      accumulate: number of micro-batches.
      processes: how many hold a part like this one.
    """
    devices = mesh.shape[REPLICA] * mesh.shape[FSDP]
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise UserError(
            "batch: every array needs the same leading dimension, the examples; "
            f"got leading dimensions {sorted(sizes)}"
        )
    examples = sizes.pop()[0] * processes
    if examples % (devices * accumulate) or not examples:
        parts = f"{devices} devices"
        if accumulate > 1:
            parts += f" x {accumulate} micro-batches (policy.accumulate)"
        raise UserError(
            f"batch of {examples} examples does not divide by {parts}; "
            f"use a multiple of {devices * accumulate}"
        )
