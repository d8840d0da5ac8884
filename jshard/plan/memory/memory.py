"""What a step needs of a GPU's memory, by part: derived, and as XLA assigned it.

The parts are derived from the abstract state, the policy and the step's jaxpr, without
compiling (``plan.memory.liveness``). Where the step is compiled as well, each part
has XLA's bytes besides (``plan.memory.reconcile``), and what of XLA's total no part
explains is a line of its own.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard.describe import format_bytes
from jshard.layout.memory_kinds import HOST as PINNED_HOST
from jshard.layout.specs import layer_dims
from jshard.plan.memory import buffers, liveness, reconcile
from jshard.plan.memory.liveness import GATHERED, GRADIENTS, SAVED, WORKSPACE
from jshard.plan.memory.reconcile import BATCH, FRAGMENTATION, OPTIMIZER, PARAMETERS
from jshard.plan.topology import GPU, GPUS_A_HOST
from jshard.policy import Names, Policy
from jshard.state import TrainState

# Of a card's memory, what the CUDA context, NCCL and cuDNN's workspaces do not take.
USABLE = 0.95
PARTS = (PARAMETERS, OPTIMIZER, BATCH, GRADIENTS, GATHERED, SAVED, WORKSPACE)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a device's memory at the fullest moment of a step.

    Attributes:
      name: of ``PARTS``, or "fragmentation".
      bytes: XLA's where the step is compiled and its buffers are known, else derived.
      derived: what it should be.
      what: it is made of, in a few words.
    """

    name: str
    bytes: int
    derived: int
    what: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step needs of one device, and of its host.

    Attributes:
      parts: of the device's memory.
      total: of the device: XLA's where the step is compiled, else the parts' sum.
      derived: the sum of what the parts should be.
      unexplained: of the total, what is in no part; 0 where nothing is compiled.
      usable: of the card; None where there is no card.
      host: what waits in pinned host memory for one device, by part.
      devices_a_host: how many share a host.
      compiled: whether the total is XLA's.
    """

    parts: tuple[Part, ...]
    total: int
    derived: int
    unexplained: int
    usable: int | None
    host: tuple[Part, ...]
    devices_a_host: int
    compiled: bool

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
    mesh: Mesh | AbstractMesh,
    policy: Policy,
    state: TrainState,
    traced: jax.stages.Traced,
    *,
    gpu: GPU | None = None,
    compiled: jax.stages.Compiled | None = None,
    dump: str | Path | None = None,
) -> Memory:
    """What a train step needs.

    Args:
      mesh: of the step.
      policy: of the step.
      state: abstract, with shardings (``FSDP.abstract_state``).
      traced: ``train_step.trace(state, batch)``.
      gpu: the card; None for a device that is no card.
      compiled: the step; None estimates it from what is derived alone.
      dump: the folder of ``buffers.dump_options`` that it was compiled with.

    Raises:
      ValueError: ``dump`` has no buffer assignment.
    """
    peak = liveness.peak(traced.jaxpr.jaxpr, state)
    derived = _arguments(state, traced, mesh, hosted=False) + peak.held
    host = _arguments(state, traced, mesh, hosted=True)
    host[SAVED] += peak.host
    names: tuple[str, ...] = PARTS
    found = derived
    if dump is not None:
        found = reconcile.account(buffers.read(dump), state)
        names = (*PARTS, FRAGMENTATION)
    what = _what(state, policy, derived, peak.where)
    parts = tuple(
        Part(name, found[name], derived[name], what.get(name, "")) for name in names
    )
    total = sum(derived.values())
    if compiled is not None:
        host = _host_total(compiled, host)
        total = device_total(compiled)
    return Memory(
        parts,
        total,
        derived.total(),
        total - sum(part.bytes for part in parts),
        None if gpu is None else int(USABLE * gpu.memory),
        tuple(Part(k, v, v, what.get(k, "")) for k, v in host.items() if v),
        min(GPUS_A_HOST, mesh.size),
        compiled is not None,
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


def _host_total(compiled: jax.stages.Compiled, derived: Any) -> Any:
    """Bytes in host memory as XLA has them: arguments as derived, and activations."""
    found: Any = compiled.memory_analysis()
    return derived | {SAVED: found.host_temp_size_in_bytes}


def _arguments(
    state: TrainState, traced: jax.stages.Traced, mesh: Any, *, hosted: bool
) -> collections.Counter[str]:
    """Bytes of a device's part of the state and the batch, by part."""
    found: collections.Counter[str] = collections.Counter()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for path, x in leaves:
        if (x.sharding.memory_kind == PINNED_HOST) == hosted:
            local = x.sharding.shard_shape(x.shape)
            size = math.prod(local) * x.dtype.itemsize
            found[reconcile.part_of(f"state{jax.tree_util.keystr(path)}")] += size
    if not hosted:
        batch = traced.jaxpr.in_avals[len(leaves) :]
        found[BATCH] = sum(map(liveness.nbytes, batch)) // mesh.size
    return found


def _what(
    state: TrainState, policy: Policy, derived: Any, where: str
) -> dict[str, str]:
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
        WORKSPACE: f"of the {_WHERE.get(where, 'step')}",
        FRAGMENTATION: "gaps in XLA's heap",
    }


_WHERE = {
    "jvp": "loss",
    "jvp loop": "forward",
    "transpose": "backward",
    "transpose loop": "backward",
    "update": "update",
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
            sizes[str(x.dtype)] += liveness.nbytes(x)
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


def lines(memory: Memory) -> list[str]:
    """The table as text: a line a part, the total against the card, the host."""
    rows: list[tuple[str, int, int | None, str]] = [
        (part.name, part.bytes, part.derived, part.what)
        for part in memory.parts
        if part.bytes or part.derived
    ]
    if memory.compiled:
        rows.append(("unexplained", memory.unexplained, None, _share(memory)))
    rows.append(("total", memory.total, memory.derived, _verdict(memory)))
    text = (
        [f"{'memory a device':<20}{'':>11}{'derived':>11}"] if memory.compiled else []
    )
    for name, size, derived, what in rows:
        both = f"{'' if derived is None else format_bytes(derived):>11}"
        line = f"{name:<20}{format_bytes(size):>11}"
        text.append(f"{line}{both if memory.compiled else ''}  {what}".rstrip())
    if memory.host:
        kinds = ", ".join(f"{p.name} {format_bytes(p.bytes)}" for p in memory.host)
        shared = format_bytes(memory.host_bytes * memory.devices_a_host)
        text.append(
            f"{'host':<20}{format_bytes(memory.host_bytes):>11}  pinned for each: "
            f"{kinds}; {shared} for the {memory.devices_a_host} of a host"
        )
    return text


def _share(memory: Memory) -> str:
    return f"{100 * memory.unexplained / max(memory.total, 1):.1f} % of the total"


def _verdict(memory: Memory) -> str:
    if memory.usable is None:
        return ""
    does = "fits in" if memory.fits else "does not fit in"
    return f"{does} {format_bytes(memory.usable)} that the card leaves"
