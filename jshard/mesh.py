"""The device mesh: "replica" (copies) by "fsdp" (shards), and maybe by "context".

Parameters are sharded over "fsdp" and "context" together. Examples are split over
"replica" and "fsdp", and each example's sequence over "context".
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jshard.errors import UserError

REPLICA = "replica"
FSDP = "fsdp"
EXPERT = "expert"
CONTEXT = "context"
TENSOR = "tensor"
AXES = (REPLICA, FSDP, EXPERT, CONTEXT, TENSOR)  # a mesh may lack the last three
BATCH = PartitionSpec((REPLICA, FSDP))  # of examples, and of all but sequences


def make_mesh(
    *,
    fsdp: int = -1,
    replica: int | Literal["hosts"] = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """Arranges devices as a ("replica", "fsdp") mesh: groups of ``fsdp`` shards.

    Neighbouring devices share an fsdp group, so that gathers stay on the fastest
    links. ``replica=2`` is hybrid sharding (HSDP); ``fsdp=1, replica=n`` is plain data
    parallelism; ``replica="hosts"`` shards within a host and replicates across hosts,
    so that only shards of gradients cross the network.

    ``context=c`` adds an axis "context", over which c neighbouring devices share the
    sequences of their examples. Parameters are sharded over "fsdp" and "context"
    together, so that the axis costs no memory (docs/how_to/long_sequences.md).

    Args:
      fsdp: number of shards of each parameter, divided by ``context``; -1 uses all
        devices of a replica.
      replica: number of copies of the sharded model; "hosts" makes one copy per host,
        or, if ``fsdp`` is given, one per ``fsdp`` x ``context`` devices of a host.
      context: number of parts of each sequence.
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
    if context < 1:
        raise UserError(f"mesh: context={context} must be at least 1")
    if replica == "hosts":
        replica, fsdp = _within_hosts(list(of_host.values()), fsdp, context)
    if not isinstance(replica, int):
        raise UserError(f"mesh: replica={replica!r} must be a number, or hosts")
    if replica < 1 or (fsdp < 1 and fsdp != -1):
        raise UserError(
            f"mesh: fsdp={fsdp}, replica={replica}: sizes must be positive "
            "(fsdp=-1 takes the remaining devices)"
        )
    others = replica * context
    named = f"replica={replica}" + (f" x context={context}" if context > 1 else "")
    if fsdp == -1:
        if len(devices) % others or len(devices) < others:
            raise UserError(
                f"mesh: {named} does not divide the {len(devices)} devices; "
                "choose a divisor"
            )
        fsdp = len(devices) // others
    if fsdp * others > len(devices):
        lower = "mesh.replica, mesh.context" if context > 1 else "mesh.replica"
        raise UserError(
            f"mesh: {named} x fsdp={fsdp} needs {fsdp * others} devices but "
            f"there are {len(devices)}; lower {lower} or mesh.fsdp"
        )
    used = devices[: fsdp * others]
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if idle:
        raise UserError(
            f"mesh: {named} x fsdp={fsdp} leaves process {min(idle)} without "
            "a device: start fewer processes, or use all devices"
        )
    shape = (replica, fsdp) if context == 1 else (replica, fsdp, context)
    grid = np.array(used, dtype=object).reshape(shape)
    return Mesh(grid, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


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


def _within_hosts(hosts: list[int], fsdp: int, context: int) -> tuple[int, int]:
    """Returns (replica, fsdp) such that no replica spans two hosts."""
    sizes = {host: hosts.count(host) for host in set(hosts)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{sizes[host]} in host {host}" for host in sorted(sizes))
        raise UserError(
            f"mesh: replica=hosts needs as many devices in each host, not {counts}"
        )
    size = max(sizes.values())
    if size % context:
        raise UserError(
            f"mesh: replica=hosts: context={context} does not divide the {size} "
            "devices of a host; choose a divisor"
        )
    fsdp = size // context if fsdp == -1 else fsdp
    if fsdp < 1 or size % (fsdp * context):
        raise UserError(
            f"mesh: replica=hosts: fsdp={fsdp} does not divide the {size // context} "
            "devices of a host; choose a divisor, or -1 for all of them"
        )
    return len(hosts) // (fsdp * context), fsdp


def check_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns ``mesh``; raises UserError unless it has "replica" and "fsdp"."""
    missing = [axis for axis in (REPLICA, FSDP) if axis not in mesh.axis_names]
    if missing:
        raise UserError(
            f"mesh: axes {mesh.axis_names} lack {missing}; make one with "
            "jshard.make_mesh, or add an axis of size 1"
        )
    return mesh


def mesh_text(mesh: Mesh) -> str:
    """Returns a mesh in words: "replica 1 x fsdp 8"."""
    return " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes_of(mesh))


def axes_of(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that are manual in a step; others are automatic."""
    return tuple(axis for axis in AXES if axis in mesh.axis_names)


def shard_axes(mesh: Mesh | AbstractMesh | None = None) -> str | tuple[str, str]:
    """Returns the axis, or axes, that shard parameters, as specs and collectives take.

    These are those of ``mesh``, or of the step that is being traced.
    """
    names = manual_axes() if mesh is None else mesh.axis_names
    return (FSDP, CONTEXT) if CONTEXT in names else FSDP


def shards_of(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of a parameter."""
    return mesh.shape[FSDP] * mesh.shape.get(CONTEXT, 1)


def batch_spec(mesh: Mesh | AbstractMesh, ndim: int) -> PartitionSpec:
    """Returns how an array of a batch is split, (examples, sequence, ...)."""
    split = (CONTEXT,) if CONTEXT in mesh.axis_names and ndim > 1 else ()
    return PartitionSpec(*BATCH, *split)


def examples_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns how examples are split over all devices, with their sequences whole."""
    return PartitionSpec(axes_of(mesh))


def rows_of_process(mesh: Mesh, *, whole: bool = False) -> tuple[int, int]:
    """Returns which part of a batch's examples this process has: (index, of how many).

    Processes that share sequences have the same examples. With ``whole`` ones, examples
    are split over all devices (``examples_spec``).

    Raises:
      UserError: this process has some of the examples of another, but not all.
    """
    names = axes_of(mesh) if whole else (REPLICA, FSDP)
    dims = [mesh.axis_names.index(name) for name in names]
    rows: dict[int, set] = {}
    for index, device in np.ndenumerate(mesh.devices):
        here = tuple(index[dim] for dim in dims)
        rows.setdefault(device.process_index, set()).add(here)
    parts = list(dict.fromkeys(frozenset(x) for x in rows.values()))
    own = frozenset(rows[jax.process_index()])
    if sum(map(len, parts)) != len(frozenset().union(*parts)):
        raise UserError(
            f"mesh: context={mesh.shape.get(CONTEXT, 1)} neither divides the "
            f"{len(mesh.local_devices)} devices of a process nor is a multiple of them"
        )
    return parts.index(own), len(parts)


def manual_axes() -> tuple[str, ...]:
    """Returns the manual mesh axes: ``axes_of`` inside a step, otherwise none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in AXES if axis in manual)


# Whether sequences are split in the part of a step that is being traced.
_split = contextvars.ContextVar("split", default=False)


@contextlib.contextmanager
def split_sequences(split: bool = True) -> Iterator[None]:
    """Says, for what is traced inside, whether sequences are split over "context"."""
    token = _split.set(split)
    try:
        yield
    finally:
        _split.reset(token)


def context_size() -> int:
    """Returns the number of devices that share the sequences of what is traced."""
    split = _split.get() and CONTEXT in manual_axes()
    return jax.lax.axis_size(CONTEXT) if split else 1


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
