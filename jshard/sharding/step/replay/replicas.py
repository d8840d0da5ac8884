"""Compares what several devices hold copies of: a hash of each, over the copies.

Small parameters, counts and statistics are on all devices, and with a "replica" axis
everything is on several. Copies go the same way in each step, so that they differ only
if a device computed or kept something wrong.
"""

import collections
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jshard.sharding.cpu.order import in_order
from jshard.sharding.layout.memory_kinds import on_device
from jshard.sharding.settings.mesh import names_of, platform
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.replay.bits import WORDS, hash_bits, joined, on_host, spec_of
from jshard.sharding.step.replay.replayed import named_arrays


class Copies(NamedTuple):
    """An array of which devices that should have the same do not.

    Attributes:
      name: the array's.
      wrong: the places in the mesh that are alone with what they hold, or all that
        differ from each other if there is no majority.
      right: the places of a majority; none if there is none.
    """

    name: str
    wrong: tuple[int, ...]
    right: tuple[int, ...]


def axes_of_copies(mesh: Mesh, spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the axes of more than one device over which an array is the same."""
    split = set(itertools.chain.from_iterable(map(names_of, spec)))
    sizes = mesh.shape.items()
    return tuple(axis for axis, size in sizes if size > 1 and axis not in split)


def bytes_sent(mesh: Mesh, state: TrainState) -> tuple[int, int, int]:
    """Returns how many arrays have copies, of how many, and the bytes all-reduced."""
    specs = [spec_of(x) for x in jax.tree.leaves(state)]
    number = sum(bool(axes_of_copies(mesh, spec)) for spec in specs)
    return number, len(specs), number * (2 * 4 * WORDS + 4)


def compare_copies(mesh: Mesh, state: TrainState) -> list[Copies]:
    """Returns the arrays of a state whose copies differ, the same on each process."""
    arrays = [(name, x) for name, x, _ in named_arrays(state)]
    arrays = [(name, x) for name, x in arrays if axes_of_copies(mesh, spec_of(x))]
    if not arrays:
        return []
    leaves = [x for _, x in arrays]
    specs = tuple(map(spec_of, leaves))
    differing, words = _comparison(mesh, specs)(leaves, state.step)
    if not np.asarray(differing).any():
        return []
    hashes = on_host(words).reshape(mesh.size, len(leaves), WORDS)
    return [
        _named(name, mesh, spec, hashes[:, i])
        for i, ((name, _), spec) in enumerate(zip(arrays, specs, strict=True))
        if np.asarray(differing)[i]
    ]


@functools.lru_cache(maxsize=4)
def _comparison(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Returns a program from arrays to int32 (arrays,), 0 if equal, and their words."""
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for i, spec in enumerate(specs):
        groups[axes_of_copies(mesh, spec)].append(i)

    def local(leaves: list[jax.Array], step: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = jnp.stack([hash_bits(on_device(x)) for x in leaves])
        differ = jnp.zeros(len(leaves), jnp.int32)
        for axes, members in groups.items():
            own = words[np.array(members)]
            # The least is the complement of the greatest complement: one all-reduce.
            greatest = lax.pmax(jnp.stack([own, ~own]), axes)
            unequal = (greatest[0] != ~greatest[1]).any(axis=-1)
            differ = differ.at[np.array(members)].set(unequal.astype(jnp.int32))
        return lax.pmax(differ, mesh.axis_names), joined([words])

    out_specs = PartitionSpec(), PartitionSpec(mesh.axis_names)
    in_specs = list(specs), PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(in_order(mapped) if platform(mesh) == "cpu" else mapped)


def _named(name: str, mesh: Mesh, spec: PartitionSpec, hashes: np.ndarray) -> Copies:
    """Finds the places whose hashes (places, words) are others than their copies'."""
    axes = axes_of_copies(mesh, spec)
    fixed = [i for i, axis in enumerate(mesh.axis_names) if axis not in axes]
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for place, where in enumerate(np.ndindex(mesh.devices.shape)):
        groups[tuple(where[i] for i in fixed)].append(place)
    wrong: list[int] = []
    right: list[int] = []
    for places in groups.values():
        own = {place: tuple(hashes[place].tolist()) for place in places}
        if len({*own.values()}) == 1:
            continue
        (most, votes), *_ = collections.Counter(own.values()).most_common()
        majority = 2 * votes > len(places)
        right += [x for x in places if majority and own[x] == most]
        wrong += [x for x in places if not majority or own[x] != most]
    return Copies(name, tuple(wrong), tuple(right))
