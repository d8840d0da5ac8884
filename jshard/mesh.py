"""The device mesh: axis "replica" (copies) times axis "fsdp" (shards)."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jshard.errors import UserError

REPLICA = "replica"
FSDP = "fsdp"
AXES = (REPLICA, FSDP)
BATCH = PartitionSpec(AXES)  # examples are split over every device of both axes


def make_mesh(
    *, fsdp: int = -1, replica: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Arranges devices as ``replica`` groups of ``fsdp`` shards.

    Neighbouring devices share an fsdp group, so that gathers stay on the fastest
    links. ``replica=2`` is hybrid sharding; ``fsdp=1, replica=n`` is plain data
    parallelism.

    Args:
      fsdp: shards of each parameter; -1 takes all devices that ``replica`` leaves.
      replica: copies of the sharded model.
      devices: the devices to use, by default all of the job's.

    Returns:
      A mesh with axes ``("replica", "fsdp")``.

    Raises:
      UserError: a size is not positive, or the mesh needs another number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if replica < 1 or (fsdp < 1 and fsdp != -1):
        raise UserError(
            f"mesh: fsdp={fsdp}, replica={replica}: sizes must be positive "
            "(fsdp=-1 takes the remaining devices)"
        )
    if fsdp == -1:
        if len(devices) % replica or len(devices) < replica:
            raise UserError(
                f"mesh: replica={replica} does not divide the {len(devices)} devices; "
                "choose a divisor"
            )
        fsdp = len(devices) // replica
    if fsdp * replica > len(devices):
        raise UserError(
            f"mesh: replica={replica} x fsdp={fsdp} needs {fsdp * replica} devices but "
            f"there are {len(devices)}; lower mesh.replica or mesh.fsdp"
        )
    grid = np.array(devices[: fsdp * replica], dtype=object).reshape(replica, fsdp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns ``mesh`` if it has both axes, else raises UserError."""
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise UserError(
            f"mesh: axes {mesh.axis_names} lack {missing}; make one with "
            "jshard.make_mesh, or add an axis of size 1"
        )
    return mesh


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that are manual here: both inside a jshard step, else none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in AXES if axis in manual)


def platform(mesh: Mesh | AbstractMesh) -> str:
    """What the devices of a mesh are: "cpu", "gpu", ..."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    device = abstract.abstract_device
    return "unknown" if device is None else device.platform


def overlaps() -> bool:
    """Whether collectives run beside computation in the step that is traced.

    On GPUs they do; XLA's CPU programs do one thing after the other.
    """
    return platform(jax.sharding.get_abstract_mesh()) == "gpu"
