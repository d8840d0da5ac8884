"""A step's memory on one device, by part, as XLA assigned it.

The total is XLA's. The parts are its buffers at the peak, classified by
``buffer_contents``; what no part explains is listed on its own.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import GPU
from jshard.plan.hlo import direction
from jshard.plan.memory import buffer_assignment
from jshard.plan.memory import buffer_contents as contents
from jshard.sharding.layout.capacity import shard_bytes
from jshard.sharding.layout.four_bit.base import four_bit_of, values_in, values_in_shard
from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.layout.specs import layer_dims
from jshard.sharding.layout.variables import own_dtypes
from jshard.sharding.settings.policy import Names, Policy
from jshard.sharding.settings.precision import PRODUCTS
from jshard.sharding.settings.state import TrainState
from jshard.system.formatting import format_bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a device's memory at a step's peak, and in words what it holds."""

    name: str
    bytes: int
    what: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a step needs on one device, and on its host."""

    parts: tuple[Part, ...]  # of the device's memory
    total: int  # bytes on the device
    unexplained: int  # bytes of the total that no part explains
    usable: int | None  # bytes of the card, or None without a card
    host: tuple[Part, ...]  # what one device keeps in pinned host memory
    devices_a_host: int  # how many devices share a host
    exact: bool = True  # whether the total is XLA's own

    @property
    def fits(self) -> bool | None:
        """Whether the total fits the card; None without a card."""
        return None if self.usable is None else self.total <= self.usable

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory for one device."""
        return sum(part.bytes for part in self.host)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = dataclasses.asdict(self)
        return found | {"fits": self.fits, "host_bytes": self.host_bytes}


def memory(
    policy: Policy,
    state: TrainState,
    compiled: jax.stages.Compiled,
    dump: str | Path,
    *,
    devices: int,
    gpu: GPU | None = None,
) -> Memory:
    """Returns the memory of a train step.

    Args:
      policy: of the step.
      state: abstract, with shardings (``FSDP.abstract_state``).
      compiled: the step, with the ``dump_options`` of ``dump``.
      dump: the folder that XLA wrote to.
      devices: how many the mesh has.
      gpu: the card, or None for other devices.

    Raises:
      ValueError: ``dump`` has no buffer assignment.
    """
    assignment = buffer_assignment.read(dump)
    found = contents.account(assignment, state)
    fullest = assignment.module.instructions.get(assignment.fullest)
    what = _contents(state, policy, direction(fullest.source if fullest else ""))
    total, host = compiled_bytes(compiled), collections.Counter[str]()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.sharding.memory_kind == HOST:
            part = contents.part_of(f"state{jax.tree_util.keystr(path)}")
            host[part] += shard_bytes(x)
    host[contents.SAVED] = compiled_bytes(compiled, "host_") - host.total()
    return Memory(
        tuple(Part(name, found[name], text) for name, text in what.items()),
        total,
        total - sum(found[name] for name in what),
        None if gpu is None else gpu.usable,
        tuple(Part(k, v, what[k]) for k, v in host.items() if v > 0),
        devices if gpu is None else min(gpu.host, devices),
    )


def _contents(state: TrainState, policy: Policy, fullest: str) -> dict[str, str]:
    """What each part holds, in words, in the order of the report."""
    params = [variable for _, variable in state.flat_params()]
    arrays = [variable.get_value() for variable in params]
    count, local = (sum(map(values, params)) for values in (values_in, values_in_shard))
    averages = "" if state.ema is None else ", averages"
    largest = _layer_bytes(state, policy)
    layer = f"; a full layer is {format_bytes(largest)}" if largest else ""
    kept = policy.reshard_after_forward
    groups = f" in groups of {kept}" if kept is not False else ""
    gathered = (
        "all of them, for the entire step"
        if policy.defer_scatter
        else "layers in use and the root"
        if kept is True
        else f"layers in use, all layers kept{groups}, the root"
    )
    gradients = "full" if policy.defer_scatter else "shards, and full ones of a layer"
    sums = ", sums over micro-batches" if policy.accumulate > 1 else ""
    return {
        contents.PARAMETERS: f"{_dtypes(arrays)}, {local:,} of {count:,}",
        contents.OPTIMIZER: f"{_dtypes(jax.tree.leaves(state.opt_state))}{averages}",
        contents.BATCH: "this device's examples",
        contents.GRADIENTS: f"{gradients}{sums}",
        contents.GATHERED: f"{gathered}{layer}",
        contents.SAVED: f"remat {_remat(policy)}",
        contents.WORKSPACE: f"of the {fullest}",
        contents.FRAGMENTATION: "gaps in XLA's heap",
    }


def _remat(policy: Policy) -> str:
    if isinstance(policy.remat, Names):
        kind = type(policy.remat).__name__
        return f"{kind}({', '.join(policy.remat.names)})"
    name = policy.remat if isinstance(policy.remat, str) else policy.remat.__name__
    first = "" if policy.first_k is None else f" of the first {policy.first_k} layers"
    return name + first


def _dtypes(leaves: Iterable[Any]) -> str:
    """The two dtypes with the most bytes."""
    sizes: collections.Counter[str] = collections.Counter()
    for x in leaves:
        if x.size > 1:
            sizes[str(x.dtype)] += x.size * x.dtype.itemsize
    return ", ".join(name for name, _ in sizes.most_common(2)) or "none"


def _layer_bytes(state: TrainState, policy: Policy) -> int:
    """Bytes of a Stack's largest layer, gathered."""
    layers: collections.Counter[tuple] = collections.Counter()
    own = own_dtypes(state, policy)
    for path, variable in state.flat_params():
        if layer_dims(variable):
            x = variable.get_value()
            precision = policy.precision_at(path, own.get(path))
            dtype = precision.compute or precision.gather or x.dtype
            shape = x.shape[layer_dims(variable) :]
            width = 1 if four_bit_of(variable) is not None else dtype.itemsize
            if precision.products is not None and len(shape) > 1:
                width = PRODUCTS[precision.products]
            layers[path[0], x.shape[0]] += round(math.prod(shape) * width)
    return max(layers.values(), default=0)
