"""The device mesh: "replica" (copies) by "fsdp" (shards), and maybe further axes.

Parameters are sharded over all axes but "replica" together. Examples are split over
"replica", "pipe", "fsdp" and "expert", and each example's sequence over "context" and
"tensor". What a model declares to be split over "tensor" (columns and rows of products)
and "expert" (experts) is not gathered over these: each device computes with its part.
"""

import contextlib
import contextvars
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jshard.sharding.settings.callers_mesh import of_auto_axes
from jshard.sharding.settings.in_stages import stages_here
from jshard.sharding.settings.scopes import within
from jshard.system.errors import UserError, warn

REPLICA = "replica"
FSDP = "fsdp"
EXPERT = "expert"
CONTEXT = "context"
TENSOR = "tensor"
PIPE = "pipe"
# A mesh may lack the last four. Each stage's shard is split further over "pipe".
AXES = (REPLICA, FSDP, EXPERT, CONTEXT, TENSOR, PIPE)
OUTSIDE_IN = (REPLICA, PIPE, FSDP, EXPERT, CONTEXT, TENSOR)  # as devices neighbour
SEQUENCE = (CONTEXT, TENSOR)  # the axes that split sequences
BATCH = PartitionSpec((REPLICA, FSDP))  # of examples, and of all but sequences


def make_mesh(
    *,
    fsdp: int = -1,
    replica: int | Literal["hosts"] = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    pipe: int = 1,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """Arranges devices as a ("replica", "fsdp") mesh: groups of ``fsdp`` shards.

    Neighbouring devices share an fsdp group, so that gathers stay on the fastest
    links. ``replica=2`` is hybrid sharding (HSDP); ``fsdp=1, replica=n`` is plain data
    parallelism; ``replica="hosts"`` shards within a host and replicates across hosts,
    so that only shards of gradients cross the network.

    Further axes are in the mesh if they are larger than 1. Parameters are sharded over
    them and "fsdp" together, so that they cost no memory. From the outside in, the
    order of axes is replica, pipe, fsdp, expert, context, tensor.

    Args:
      fsdp: number of shards of each parameter, divided by the sizes of all other axes
        but "replica"; -1 uses all devices of a replica.
      replica: number of copies of the sharded model; "hosts" makes one copy per host,
        or, if the other sizes are given, one per as many devices of a host.
      context: number of parts of each sequence (docs/how_to/long_sequences.md).
      tensor: number of devices that share the heads, columns and rows of each layer,
        and the sequence between layers (docs/how_to/tensor.md).
      expert: number of devices that share the experts of each layer
        (docs/how_to/experts.md).
      pipe: number of stages of a Stack's layers (docs/how_to/pipeline.md).
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
    inner = {PIPE: pipe, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
    for name, size in inner.items():
        if size < 1:
            raise UserError(f"mesh: {name}={size} must be at least 1")
    inner = {name: size for name, size in inner.items() if size > 1}
    size = math.prod(inner.values())
    if replica == "hosts":
        replica, fsdp = _within_hosts(list(of_host.values()), fsdp, inner)
    if not isinstance(replica, int):
        raise UserError(f"mesh: replica={replica!r} must be a number, or hosts")
    if replica < 1 or (fsdp < 1 and fsdp != -1):
        raise UserError(
            f"mesh: fsdp={fsdp}, replica={replica}: sizes must be positive "
            "(fsdp=-1 uses the remaining devices)"
        )
    others = replica * size
    named = named_sizes({REPLICA: replica, **inner})
    if fsdp == -1:
        if len(devices) % others or len(devices) < others:
            raise UserError(
                f"mesh: {named} does not divide the {len(devices)} devices; "
                "choose a divisor"
            )
        fsdp = len(devices) // others
    if fsdp * others > len(devices):
        lower = ", ".join(f"mesh.{name}" for name in (REPLICA, *inner))
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
    sizes = {REPLICA: replica, FSDP: fsdp, **inner}
    names = tuple(axis for axis in OUTSIDE_IN if axis in sizes)
    grid = np.array(used, dtype=object).reshape([sizes[axis] for axis in names])
    if tensor > 1:
        _warn_of_tensor_across_hosts(grid, of_host)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def named_sizes(sizes: Mapping[str, int]) -> str:
    """Returns sizes of axes in words: "context=2 x tensor=4"."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def _warn_of_tensor_across_hosts(grid: Any, of_host: Mapping[Any, Any]) -> None:
    """Warns if neighbours along the last dimension are in several hosts."""
    groups = grid.reshape(-1, grid.shape[-1])
    most = max(len({of_host[device] for device in group}) for group in groups)
    if most > 1:
        warn(
            f"mesh: tensor={grid.shape[-1]} spans {most} hosts, so the activations of "
            "every layer cross the network, about four times per layer and pass; "
            "choose at most the number of devices of a host (the start-up note says "
            "how many bytes)"
        )


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


def _within_hosts(
    hosts: list[int], fsdp: int, inner: Mapping[str, int]
) -> tuple[int, int]:
    """Returns (replica, fsdp) such that no replica spans two hosts.

    ``inner`` are the sizes of the axes inside of "fsdp".
    """
    sizes = {host: hosts.count(host) for host in set(hosts)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{sizes[host]} in host {host}" for host in sorted(sizes))
        raise UserError(
            "mesh: replica=hosts needs the same number of devices on each host, "
            f"not {counts}"
        )
    size, within = max(sizes.values()), math.prod(inner.values())
    if size % within:
        raise UserError(
            f"mesh: replica=hosts: {named_sizes(inner)} does not divide the {size} "
            "devices of a host; choose a divisor"
        )
    fsdp = size // within if fsdp == -1 else fsdp
    if fsdp < 1 or size % (fsdp * within):
        raise UserError(
            f"mesh: replica=hosts: fsdp={fsdp} does not divide the {size // within} "
            "devices of a host; choose a divisor, or -1 for all of them"
        )
    return len(hosts) // (fsdp * within), fsdp


def check_mesh(mesh: Mesh | AbstractMesh) -> Any:
    """Returns ``mesh`` with Auto axes; raises UserError for axes that it lacks."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise UserError(f"mesh is a {type(mesh).__name__}; see jshard.make_mesh")
    missing = [axis for axis in (REPLICA, FSDP) if axis not in mesh.axis_names]
    if missing:
        raise UserError(
            f"mesh: axes {mesh.axis_names} lack {missing}; make one with "
            "jshard.make_mesh, or add an axis of size 1"
        )
    return of_auto_axes(mesh)


def mesh_text(mesh: Mesh) -> str:
    """Returns a mesh in words: "replica 1 x fsdp 8"."""
    axes = [axis for axis in OUTSIDE_IN if axis in mesh.axis_names]
    return " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)


def mesh_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that are manual in a step; others are automatic."""
    return tuple(axis for axis in AXES if axis in mesh.axis_names)


def shard_axes(mesh: Mesh | AbstractMesh | None = None) -> str | tuple[str, ...]:
    """Returns the axis, or axes, that shard parameters, as specs and collectives take.

    These are those of ``mesh``, or of the step that is being traced.
    """
    names = manual_axes() if mesh is None else mesh_axes(mesh)
    axes = tuple(axis for axis in names if axis != REPLICA)
    return axes if len(axes) > 1 else FSDP


def names_of(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the names of axes as PartitionSpecs have them."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def shards_of(mesh: Mesh | AbstractMesh, *, split: bool = False) -> int:
    """Returns the number of shards of a parameter.

    If it is ``split`` over "tensor" and "expert", these are shards of a device's part.
    """
    skipped = (REPLICA, TENSOR, EXPERT) if split else (REPLICA,)
    return math.prod(mesh.shape[a] for a in mesh_axes(mesh) if a not in skipped)


def example_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that split the examples of a batch for training."""
    apart = [axis for axis in OUTSIDE_IN if axis not in SEQUENCE]
    return tuple(axis for axis in apart if axis in mesh.axis_names)


def groups_of_examples(mesh: Mesh | AbstractMesh) -> int:
    """Returns over how many groups of devices the examples of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in example_axes(mesh))


def devices_of_a_sequence(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Returns the axes of a mesh over which sequences are split, and their sizes."""
    return {axis: mesh.shape[axis] for axis in SEQUENCE if mesh.shape.get(axis, 1) > 1}


def batch_spec(mesh: Mesh | AbstractMesh, *, sequence: bool) -> PartitionSpec:
    """Returns how an array (examples, ...) is split, or (examples, sequence, ...)."""
    split = [axis for axis in SEQUENCE if sequence and axis in mesh.axis_names]
    examples = example_axes(mesh)
    return PartitionSpec(*((examples, tuple(split)) if split else (examples,)))


def examples_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns how examples are split over all devices, with their sequences whole."""
    return PartitionSpec(tuple(axis for axis in OUTSIDE_IN if axis in mesh.axis_names))


def manual_axes() -> tuple[str, ...]:
    """Returns the manual mesh axes: ``mesh_axes`` inside a step, otherwise none.

    Without "pipe" for what runs in a stage, with the stage's devices alone.
    """
    axes = AXES if stages_here() == 1 else [axis for axis in AXES if axis != PIPE]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis in manual)


def stages_of(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of stages of a pipeline; 1 is none."""
    return mesh.shape.get(PIPE, 1)


# While a step is traced: the axes whose devices share the sequences of their examples,
# and those of them over which sequences are split here.
_sequences = contextvars.ContextVar[tuple[tuple[str, ...], tuple[str, ...]]](
    "sequences", default=((), ())
)


def split_sequences(
    axes: tuple[str, ...] = SEQUENCE,
) -> contextlib.AbstractContextManager[None]:
    """Says, for what is traced inside, over which axes sequences are split.

    Inside of another such context, these are some of its axes, and the devices of the
    others have the same sequences.
    """
    shared, _ = _sequences.get()
    return within(_sequences, (shared or axes, axes))


def sequence_axes() -> tuple[str, ...]:
    """Returns the axes over which the sequences of what is traced are split."""
    _, split = _sequences.get()
    return tuple(axis for axis in manual_axes() if axis in split)


def shared_axes() -> tuple[str, ...]:
    """Returns the axes whose devices share the sequences of what is traced."""
    shared, _ = _sequences.get()
    return tuple(axis for axis in manual_axes() if axis in shared)


def context_size() -> int:
    """Returns the number of devices that share the sequences of what is traced."""
    axes = sequence_axes()
    return jax.lax.axis_size(axes) if axes else 1


def platform(mesh: Mesh | AbstractMesh) -> str:
    """Returns the platform of a mesh's devices: "cpu", "gpu", ..."""
    device = mesh.abstract_mesh.abstract_device
    return "unknown" if device is None else device.platform


def capability(device: Any) -> tuple[int, ...] | None:
    """Returns the compute capability of an NVIDIA GPU; None for other devices."""
    text = str(getattr(device, "compute_capability", None))
    return tuple(map(int, text.split("."))) if "." in text else None  # AMD: gfx942


def on_gpus() -> bool:
    """Returns whether the step that is being traced runs on GPUs.

    There collectives overlap with computation; on CPUs XLA runs one operation at a
    time.
    """
    return platform(jax.sharding.get_abstract_mesh()) == "gpu"
