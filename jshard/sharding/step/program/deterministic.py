"""Whether a step's program computes the same bits each time, beyond XLA's own part.

XLA's operations do with the options of ``xla_options.DETERMINISTIC``. What else is in a
program is refused if it cannot, and named if that is not known.
"""

import os
from typing import Any

import jax
from jax.extend import core

from jshard.sharding.settings.mesh import capability
from jshard.system.cli.machine.platform import SUMS_IN_SWITCH
from jshard.system.compat import jaxprs
from jshard.system.compat.absent_gpus import cudnn_version
from jshard.system.compat.programs import lines
from jshard.system.errors import UserError, some_of

# Code that XLA does not compile: one that is named in a program is not known.
_UNKNOWN = {"ffi_call", "pure_callback"} | jaxprs.KERNELS
_BLACKWELL = (10, 0)
_CUDNN = (9, 18)  # the first whose backward of attention can there


def check_deterministic(jaxpr: core.Jaxpr, device: Any, devices: int) -> str:
    """Says how far a step has the same bits each time.

    Args:
      jaxpr: The step's program.
      device: One of those that run it.
      devices: How many do.

    Raises:
      UserError: It cannot have the same bits; the message names what, and where.
    """
    unknown: dict[str, str] = {}  # with their first lines
    for eqn in jaxprs.nested(jaxpr.eqns):
        name = eqn.primitive.name
        if why := _obstacle(eqn, device):
            raise UserError(
                f"deterministic=true: {name} at {lines.line_of(eqn, jaxpr.eqns)} {why}"
            )
        if name in _UNKNOWN:
            unknown.setdefault(name, f"{name} at {lines.line_of(eqn, jaxpr.eqns)}")
    said = "the same bits each time, on this mesh and with these versions"
    if device.platform == "cpu":
        said += "; CPUs of one process add in another order than those of several"
    elif devices > 1 and jax.default_backend() == "gpu":  # rather than absent ones
        _check_nccl()
    if unknown:
        said += f"; not known of {some_of(list(unknown.values()), limit=3)}"
    return said


def _obstacle(eqn: Any, device: Any) -> str:
    """Returns why an equation has other bits each time; "" if that is not so."""
    name = eqn.primitive.name
    if name == "rng_uniform":
        return "draws from a state of the device, which no seed sets: use jax.random"
    if name == "io_callback" and eqn.outvars:
        return (
            "returns what Python computes from more than its arguments: use "
            "jax.pure_callback for a function of these"
        )
    if name.startswith("dot_product_attention") and "_bwd" in name:
        found = capability(device)
        if found is not None and found >= _BLACKWELL and cudnn_version() < _CUDNN:
            return (
                f"is not deterministic on {device.device_kind} before cuDNN "
                f"{_CUDNN[0]}.{_CUDNN[1]}: pip install -U nvidia-cudnn-cu12 (or "
                "-cu13), or use attention 'blockwise'"
            )
    return ""


def _check_nccl() -> None:
    """Raises UserError if NCCL may add in the switch, in any order."""
    if os.environ.get(SUMS_IN_SWITCH) != "0":
        raise UserError(
            "deterministic=true: NCCL may add up in NVLink's switch, in another order "
            f"each time: set {SUMS_IN_SWITCH}=0 in the environment of all processes"
        )
