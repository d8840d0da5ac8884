"""Synchronised batch normalisation: statistics over the global batch, in a step."""

from typing import Any

from flax import nnx

from jshard.errors import UserError
from jshard.fsdp.mesh import AXES, manual_axes


def over_all_devices(module: Any) -> None:
    """Makes an ``nnx.BatchNorm`` without ``axis_name`` use all devices of a step.

    Raises:
      UserError: it names an axis that a step has not, as models for ``pmap`` do.
    """
    if not isinstance(module, nnx.BatchNorm):
        return
    if module.axis_name is None:
        module.axis_name = manual_axes() or AXES[:2]  # pyright: ignore[reportAttributeAccessIssue]
    if not _names(module) <= set(AXES):
        raise UserError(
            f"nnx.BatchNorm(axis_name={module.axis_name!r}): a step has no such axis; "
            "leave axis_name out, and statistics are those of the whole batch, over "
            "all devices"
        )


def of_one_device(module: Any) -> None:
    """Undoes ``over_all_devices``, for calls outside a step, without mesh axes."""
    if isinstance(module, nnx.BatchNorm) and _names(module) <= set(AXES):
        module.axis_name = None


def _names(module: nnx.BatchNorm) -> set[str]:
    name: Any = module.axis_name
    return {name} if isinstance(name, str) else set(name or ())


def batch_norms(model: nnx.Module) -> list[str]:
    """Returns the paths of all ``nnx.BatchNorm`` modules."""
    return [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm)
    ]
