"""The devices that communicate: the groups of a collective, as XLA writes them."""

import itertools
import math
import re

import numpy as np

_LISTED_GROUPS = re.compile(r"(?:groups|pairs)=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA_GROUPS = re.compile(rf"replica_groups=\[([\d,]+)\]<=({_IOTA})")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_ALONG = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


def groups_of(name: str, text: str) -> Groups:
    """Returns the device numbers of a collective's groups, or pairs; () is one of all.

    Args:
      name: of the collective.
      text: its attributes.

    Raises:
      ValueError: the groups are written in a way that is not known.
    """
    if listed := _LISTED_GROUPS.search(text):
        return tuple(map(numbers, re.findall(r"\{([\d,]*)\}", listed[1])))
    if mesh := _MESH_GROUPS.search(text):
        return _groups_of_mesh(*mesh.groups(""))
    if iota := _IOTA_GROUPS.search(text):  # [groups, size]<=[dims]T(order)
        return _groups(_device_numbers(iota[2]), numbers(iota[1])[-1])
    if unknown := re.search(r"\breplica_groups=(?!\{\})(.{,80})", text):
        raise ValueError(f"{name}: unknown form of device groups: {unknown[1]}")
    return ()


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of ``4,<=16``, of a shape or a list."""
    return tuple(int(x.strip("<=")) for x in text.split(",") if x.strip("<="))


def _groups_of_mesh(axes: str, devices: str, chosen: str) -> Groups:
    """Groups along the ``chosen`` ones of ``mesh['replica'=2,'fsdp'=4] {'fsdp'}``.

    ``devices`` are the mesh's in order, listed or as an iota; empty if they are in the
    order of their numbers. The compiler's partitioner also divides an axis of ``n``:
    ``'fsdp':(2)4`` is the middle one of its parts of 2, 4 and ``n / 8``.
    """
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    along = [
        (name, int(before or 1), int(size or sizes.get(name, 0)))
        for name, before, size in _ALONG.findall(chosen)
    ]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in along:
        cuts.get(name, set()).update((before, before * size))
    parts = [
        (name, start, end // start)
        for name in sizes
        for start, end in itertools.pairwise(sorted(cuts[name]))
    ]
    along = [part for part in along if sizes.get(part[0]) != 1]
    shape = [size for _, _, size in parts]
    if not set(along) <= set(parts) or math.prod(shape) != math.prod(sizes.values()):
        raise ValueError(f"device groups along {chosen} of a mesh {axes}")
    mesh = _device_numbers(devices or f"[{math.prod(shape)}]").reshape(shape)
    others = [part for part in parts if part not in along]
    order = [parts.index(part) for part in (*others, *along)]
    return _groups(mesh.transpose(order), math.prod(size for _, _, size in along))


def _device_numbers(text: str) -> np.ndarray:
    """The numbers of ``0,3,1,2`` or of an iota, ``[4,2]T(1,0)``: a transposed range."""
    iota = re.fullmatch(_IOTA, text)
    if iota is None:
        return np.array(numbers(text))
    dims = numbers(iota[1])
    order = numbers(iota[2]) if iota[2] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def _groups(numbers: np.ndarray, size: int) -> Groups:
    return tuple(map(tuple, numbers.reshape(-1, size).tolist()))
