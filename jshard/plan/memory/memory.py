"""What a step needs of a device's memory, by part, as XLA assigned it.

The total is XLA's; the parts are its buffers at the fullest moment, told apart by
``plan.memory.parts``. What no part explains is a figure of its own.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jshard.formatting import format_bytes
from jshard.layout.memory_kinds import HOST
from jshard.layout.specs import layer_dims
from jshard.plan.hlo.source import direction
from jshard.plan.memory import buffers
from jshard.plan.memory.parts import (
    BATCH,
    FRAGMENTATION,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    SAVED,
    WORKSPACE,
    account,
    part_of,
)
from jshard.plan.topology import GPU, GPUS_A_HOST
from jshard.policy import Names, Policy
from jshard.state import TrainState

PARTS = (PARAMETERS, OPTIMIZER, BATCH, GRADIENTS, GATHERED, SAVED, WORKSPACE)
PARTS += (FRAGMENTATION,)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a device's memory at the fullest moment of a step.

    Attributes:
      name: of ``PARTS``.
      bytes: of it.
      what: it is made of, in a few words.
    """

    name: str
    bytes: int
    what: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step needs of one device, and of its host.

    Attributes:
      parts: of the device's memory.
      total: of the device.
      unexplained: of the total, what is in no part.
      usable: of the card; None where there is no card.
      host: what waits in pinned host memory for one device, by part.
      devices_a_host: how many share a host.
    """

    parts: tuple[Part, ...]
    total: int
    unexplained: int
    usable: int | None
    host: tuple[Part, ...]
    devices_a_host: int

    @property
    def fits(self) -> bool | None:
        """Whether the total is usable; None where there is no card."""
        return None if self.usable is None else self.total <= self.usable

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory for one device."""
        return sum(part.bytes for part in self.host)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "fits": self.fits,
            "host_bytes": self.host_bytes,
        }


def memory(
    policy: Policy,
    state: TrainState,
    compiled: jax.stages.Compiled,
    dump: str | Path,
    *,
    devices: int,
    gpu: GPU | None = None,
) -> Memory:
    """What a train step needs.

    Args:
      policy: of the step.
      state: abstract, with shardings (``FSDP.abstract_state``).
      compiled: the step.
      dump: the folder of ``buffers.dump_options`` that it was compiled with.
      devices: of the mesh.
      gpu: the card; None for a device that is no card.

    Raises:
      ValueError: ``dump`` has no buffer assignment.
    """
    assignment = buffers.read(dump)
    found = account(assignment, state)
    fullest = assignment.module.instructions.get(assignment.fullest)
    what = _what(state, policy, direction(fullest.source if fullest else ""))
    parts = tuple(Part(name, found[name], what[name]) for name in PARTS)
    total, host = device_total(compiled), _hosted(state)
    host[SAVED] = host_total(compiled) - host.total()
    return Memory(
        parts,
        total,
        total - sum(part.bytes for part in parts),
        None if gpu is None else gpu.usable,
        tuple(Part(k, v, what[k]) for k, v in host.items() if v > 0),
        min(GPUS_A_HOST, devices),
    )


def device_total(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program needs of a device, from its start to its end."""
    found: Any = compiled.memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )


def host_total(compiled: jax.stages.Compiled) -> int:
    """Bytes that it needs of pinned host memory for a device."""
    found: Any = compiled.memory_analysis()
    return (
        found.host_argument_size_in_bytes
        + found.host_output_size_in_bytes
        - found.host_alias_size_in_bytes
        + found.host_temp_size_in_bytes
    )


def shard_bytes(x: Any) -> int:
    """Bytes of an abstract array's part on one device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _hosted(state: TrainState) -> collections.Counter[str]:
    """Bytes of a device's part of the state that wait in host memory, by part."""
    found: collections.Counter[str] = collections.Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.sharding.memory_kind == HOST:
            found[part_of(f"state{jax.tree_util.keystr(path)}")] += shard_bytes(x)
    return found


def _what(state: TrainState, policy: Policy, fullest: str) -> dict[str, str]:
    """A few words on each part."""
    params = jax.tree.leaves((state.params, state.frozen))
    count = sum(x.size for x in params)
    local = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in params)
    averages = "" if state.ema is None else ", averages"
    whole = _layer_bytes(state, policy)
    layer = f"; a layer is {format_bytes(whole)} whole" if whole else ""
    kept = policy.reshard_after_forward
    gathered = (
        "all of them, the whole step"
        if policy.defer_scatter
        else "layers in use and the root"
        if kept is True
        else f"layers in use, all layers kept{_in_groups(kept)}, the root"
    )
    gradients = "whole" if policy.defer_scatter else "shards, and whole ones of a layer"
    sums = ", sums over micro-batches" if policy.accumulate > 1 else ""
    return {
        PARAMETERS: f"{_dtypes(params)}, {local:,} of {count:,}",
        OPTIMIZER: f"{_dtypes(jax.tree.leaves(state.opt_state))}{averages}",
        BATCH: "this device's examples",
        GRADIENTS: f"{gradients}{sums}",
        GATHERED: f"{gathered}{layer}",
        SAVED: f"remat {_remat(policy)}",
        WORKSPACE: f"of the {fullest}",
        FRAGMENTATION: "gaps in XLA's heap",
    }


def _in_groups(kept: bool | int) -> str:
    return f" in groups of {kept}" if kept is not False else ""


def _remat(policy: Policy) -> str:
    if isinstance(policy.remat, Names):
        kind = type(policy.remat).__name__
        return f"{kind}({', '.join(policy.remat.names)})"
    name = policy.remat if isinstance(policy.remat, str) else policy.remat.__name__
    first = "" if policy.first_k is None else f" of the first {policy.first_k} layers"
    return name + first


def _dtypes(leaves: Iterable[Any]) -> str:
    """The dtypes of arrays, those of most bytes first."""
    sizes: collections.Counter[str] = collections.Counter()
    for x in leaves:
        if x.size > 1:
            sizes[str(x.dtype)] += x.size * x.dtype.itemsize
    return ", ".join(name for name, _ in sizes.most_common(2)) or "none"


def _layer_bytes(state: TrainState, policy: Policy) -> int:
    """Bytes of the largest layer of a Stack, gathered."""
    layers: collections.Counter[tuple] = collections.Counter()
    for tree in (state.params, state.frozen):
        for path, variable in nnx.to_flat_state(tree):
            if layer_dims(variable):
                x, precision = variable.get_value(), policy.precision_at(path)
                dtype = precision.compute or precision.gather or x.dtype
                layer = math.prod(x.shape[layer_dims(variable) :])
                layers[path[0], x.shape[0]] += layer * dtype.itemsize
    return max(layers.values(), default=0)
