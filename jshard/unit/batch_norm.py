"""Batch normalisation as on one device: its statistics are of the whole batch."""

from typing import Any

from flax import nnx

from jshard.mesh import AXES


def over_all_devices(module: Any) -> None:
    """In a step: statistics of an ``nnx.BatchNorm`` are of all devices' examples."""
    if isinstance(module, nnx.BatchNorm) and module.axis_name is None:
        module.axis_name = AXES  # pyright: ignore[reportAttributeAccessIssue]


def of_one_device(module: Any) -> None:
    """Outside of steps, where there are no mesh axes: of the examples it is given."""
    if isinstance(module, nnx.BatchNorm):
        name: Any = module.axis_name
        names = {name} if isinstance(name, str) else set(name or ())
        if names <= set(AXES):
            module.axis_name = None


def batch_norms(model: nnx.Module) -> list[str]:
    """Paths of the modules whose statistics are of a batch."""
    return [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm)
    ]
