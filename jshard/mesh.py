"""The device mesh: axis "replica" (copies) by axis "fsdp" (shards)."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jshard.errors import UserError

REPLICA = "replica"
FSDP = "fsdp"
AXES = (REPLICA, FSDP)
BATCH = PartitionSpec(AXES)  # examples are split over all devices of both axes


def make_mesh(
    *,
    fsdp: int = -1,
    replica: int | Literal["hosts"] = 1,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """Arranges devices as a ("replica", "fsdp") mesh: groups of ``fsdp`` shards.

    Neighbouring devices share an fsdp group, so that gathers stay on the fastest
    links. ``replica=2`` is hybrid sharding (HSDP); ``fsdp=1, replica=n`` is plain data
    parallelism; ``replica="hosts"`` shards within a host and replicates across hosts,
    so that only shards of gradients cross the network.

    Args:
      fsdp: number of shards of each parameter; -1 uses all devices of a replica.
      replica: number of copies of the sharded model; "hosts" makes one copy per host,
        or, if ``fsdp`` is given, one per ``fsdp`` devices of a host.
      devices: the devices to use, by default all devices of the job.
      hosts: the number of the host that each process runs on, by process index; by
        default determined as in ``hosts_of``.

    Raises:
      UserError: a size is not positive, the sizes do not fit the devices, or
        ``replica="hosts"`` and hosts have unequal numbers of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    # By host first: the processes of a host need not have neighbouring indices.
    of_host = dict(zip(devices, hosts_of(devices, hosts), strict=True))
    devices.sort(key=of_host.__getitem__)
    if replica == "hosts":
        replica, fsdp = _within_hosts(list(of_host.values()), fsdp)
    if not isinstance(replica, int):
        raise UserError(f"mesh: replica={replica!r} must be a number, or hosts")
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
    used = devices[: fsdp * replica]
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if idle:
        raise UserError(
            f"mesh: replica={replica} x fsdp={fsdp} leaves process {min(idle)} without "
            "a device: start fewer processes, or use all devices"
        )
    grid = np.array(used, dtype=object).reshape(replica, fsdp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def hosts_of(devices: Sequence[Any], hosts: Sequence[int] | None = None) -> list[Any]:
    """Returns each device's host number: the domain of its fastest links.

    Args:
      devices: the devices of a mesh, or of ``jshard.plan.topology.devices``.
      hosts: the host of each process, by process index. By default a GPU's host is its
        ``slice_index``, which JAX derives from the machine's boot id (or from the
        NVLink domain, if that is larger), and any other device's is its process.
    """
    if hosts is not None:
        return [hosts[device.process_index] for device in devices]
    # The absent devices of a topology all have slice 0.
    attribute = "slice_index" if jax.process_count() > 1 else "process_index"
    numbers = [getattr(device, attribute, None) for device in devices]
    if None in numbers:
        numbers = [device.process_index for device in devices]
    return numbers


def _within_hosts(hosts: list[int], fsdp: int) -> tuple[int, int]:
    """Returns (replica, fsdp) such that no fsdp group spans two hosts."""
    sizes = {host: hosts.count(host) for host in set(hosts)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{sizes[host]} in host {host}" for host in sorted(sizes))
        raise UserError(
            f"mesh: replica=hosts needs as many devices in each host, not {counts}"
        )
    size = max(sizes.values())
    fsdp = size if fsdp == -1 else fsdp
    if fsdp < 1 or size % fsdp:
        raise UserError(
            f"mesh: replica=hosts: fsdp={fsdp} does not divide the {size} devices of a "
            "host; choose a divisor, or -1 for all of them"
        )
    return len(hosts) // fsdp, fsdp


def check_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns ``mesh``; raises UserError unless it has both axes."""
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise UserError(
            f"mesh: axes {mesh.axis_names} lack {missing}; make one with "
            "jshard.make_mesh, or add an axis of size 1"
        )
    return mesh


def manual_axes() -> tuple[str, ...]:
    """Returns the manual mesh axes: both inside a jshard step, otherwise none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in AXES if axis in manual)


def platform(mesh: Mesh | AbstractMesh) -> str:
    """Returns the platform of a mesh's devices: "cpu", "gpu", ..."""
    device = mesh.abstract_mesh.abstract_device
    return "unknown" if device is None else device.platform


def on_gpus() -> bool:
    """Returns whether the step that is being traced runs on GPUs.

    There collectives overlap with computation; on CPUs XLA runs one operation at a
    time.
    """
    return platform(jax.sharding.get_abstract_mesh()) == "gpu"
