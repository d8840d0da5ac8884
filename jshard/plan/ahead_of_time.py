"""Compiles for devices that are not there."""

from typing import Any

import jax
from jax.sharding import Mesh

from jshard.compat import absent_gpus


def compile_for(
    mesh: Mesh, traced: jax.stages.Traced, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles for the GPUs of ``mesh`` what was traced on its ``abstract_mesh``.

    Devices of a topology have no memory kinds, so that a sharding over them forgets
    that an array is in host memory. An abstract mesh keeps it.

    Args:
      mesh: of ``jshard.plan.devices``.
      traced: a step, for instance.
      options: of the compiler.
    """
    return compile_lowered(mesh, lower_for_gpus(traced), options)


def lower_for_gpus(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers for GPUs what was traced on the ``abstract_mesh`` of absent ones."""
    with absent_gpus.lowering_without_devices():
        return traced.lower(lowering_platforms=("cuda",))


def compile_lowered(
    mesh: Mesh, lowered: Any, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles for the GPUs of ``mesh`` what ``lower_for_gpus`` lowered."""
    return absent_gpus.compile_lowered(
        lowered, mesh.devices.flatten().tolist(), options
    )
