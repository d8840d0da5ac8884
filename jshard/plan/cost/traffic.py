"""What a step sends: every collective of the compiled program, and the least there is.

The rows are counted in XLA's program, loops unrolled, so that they hold what the
partitioner and the compiler added or combined. ``least`` follows from the state and the
policy alone: what no fully sharded step can do without.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jshard.comm.quantized import is_quantized
from jshard.comm.varying import is_float
from jshard.layout.layers import layer_dims
from jshard.layout.layout import Layout
from jshard.layout.specs import LOOKED_UP
from jshard.mesh import FSDP, REPLICA
from jshard.plan.cost.cost import Transfer, transfer
from jshard.plan.hlo.hlo import Computation, Module
from jshard.plan.topology import GPU
from jshard.policy import Policy, UnitPolicy
from jshard.state import TrainState
from jshard.unit.segments import spans

NVLINK, NETWORK, SHARED = "NVLink", "network", "shared memory"


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind, of the same dtypes, over the same link.

    Attributes:
      kind: "all-gather", "reduce-scatter", ...
      dtype: on the wire, XLA's name; of one that moves several, "bf16+f32".
      link: "NVLink" within a host, "network" beyond; "shared memory" of CPU devices.
      group: devices that take part together.
      count: how many run in a step.
      bytes: that a device receives in a step.
      network_bytes: of these, through its own network port: what is left to the ports
        of its host's other devices comes on over NVLink.
      seconds: with the links to themselves; None where they are not known.
    """

    kind: str
    dtype: str
    link: str
    group: int
    count: int
    bytes: int
    network_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All of a step's.

    Attributes:
      rows: those with most bytes first.
      least: bytes a device that the sharding itself needs, by (kind, dtype).
    """

    rows: tuple[Row, ...]
    least: dict[tuple[str, str], int]

    @property
    def bytes(self) -> int:
        """That a device receives in a step."""
        return sum(row.bytes for row in self.rows)

    @property
    def network_bytes(self) -> int:
        """Of these, through the device's own network port."""
        return sum(row.network_bytes for row in self.rows)

    @property
    def least_bytes(self) -> int:
        """The least that it must receive."""
        return sum(self.least.values())


def count(module: Module, num_devices: int, gpu: GPU | None) -> tuple[Row, ...]:
    """The collectives of a compiled program; groups of one device are none.

    Args:
      module: as ``jshard.plan.hlo.hlo.parse`` reads it.
      num_devices: that it is compiled for.
      gpu: what it is compiled for; None for a CPU.
    """
    found: dict[tuple[str, str, str, int], Row] = {}
    for moved, times in _transfers(module, module.entry, num_devices, 1):
        if moved.group == 1:
            continue
        link = SHARED if gpu is None else NETWORK if moved.network else NVLINK
        dtype = "+".join(sorted(name for name, _ in moved.dtypes))
        key = (moved.kind, dtype, link, moved.group)
        seconds = times * moved.seconds(gpu) if gpu else None
        network = times * moved.network_bytes if link == NETWORK else 0
        row = Row(*key, times, times * moved.wire_bytes, network, seconds)
        found[key] = _add(found[key], row) if key in found else row
    return tuple(sorted(found.values(), key=lambda row: -row.bytes))


def _add(a: Row, b: Row) -> Row:
    seconds = None
    if a.seconds is not None and b.seconds is not None:
        seconds = a.seconds + b.seconds
    total = {
        name: getattr(a, name) + getattr(b, name)
        for name in ("count", "bytes", "network_bytes")
    }
    return dataclasses.replace(a, **total, seconds=seconds)


def _transfers(
    module: Module, computation: Computation, num_devices: int, times: int
) -> Iterator[tuple[Transfer, int]]:
    for x in computation.instructions:
        moved = transfer(module, computation, x, num_devices)
        if moved is not None:
            yield moved, times
        elif x.opcode == "while":
            body = module.body(x)
            yield from _transfers(module, body, num_devices, times * (x.trips or 1))
        elif x.opcode in ("call", "conditional"):
            for inside in module.inside(x):
                yield from _transfers(module, inside, num_devices, times)


def least(
    mesh: Any, policy: Policy, state: TrainState, *, prefetch: bool
) -> dict[tuple[str, str], int]:
    """The bytes that a device must receive in a step, by (kind, dtype).

    Each sharded parameter is gathered once forward; a Stack's matrices, which its
    backward reads, once more where they are dropped in between; each gradient is
    scattered once, and on a hybrid mesh summed over the copies as a shard. All but the
    last for every micro-batch, unless ``defer_scatter`` does them once. A collective
    over n devices brings (n-1)/n of the whole (docs/memory.md).

    What is replicated, embeddings that are looked up, what a Unit's backward gathers
    again (not all of them read their weights), scales of one-byte gathers and the
    optimizer's own are not in it.

    Args:
      mesh: of the step, abstract or not.
      policy: of the step.
      state: abstract, with shardings.
      prefetch: whether layers are gathered ahead where the policy leaves it open: then
        the backward begins with the last layer's weights, which the forward had.
    """
    shards, copies = mesh.shape[FSDP], mesh.shape[REPLICA]
    places = Layout.of(state, policy, mesh).places
    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(kind: str, dtype: Any, elements: float) -> None:
        dtype = jnp.dtype(dtype)
        # One-byte dtypes travel as bits.
        name = "int8" if dtype.itemsize == 1 else dtype.name
        found[kind, _xla_name(name)] += round(elements * dtype.itemsize)

    for tree in (state.params, state.frozen):
        for path, variable in nnx.to_flat_state(tree):
            place, x = places[path], variable.get_value()
            if place.dim is None or shards == 1:
                continue
            if variable.get_metadata(LOOKED_UP, False) and not policy.defer_scatter:
                continue
            shard = math.prod(x.sharding.shard_shape(x.shape))
            moved = shard * (shards - 1)
            moved *= 1 if policy.defer_scatter else policy.accumulate
            wire = jnp.dtype(place.gather or x.dtype)
            add("all-gather", wire, moved)
            depth = layer_dims(variable)
            if depth and x.ndim - depth > 1 and not policy.defer_scatter:
                unit = policy.unit(path)
                again = _gathered_again(unit, x.shape[depth - 1], prefetch)
                again /= x.shape[depth - 1]
                group = int(unit.reshard_after_forward)
                if unit.reshard_after_forward is True:
                    add("all-gather", wire, again * moved)
                elif group:  # of what is kept, in the smaller dtype
                    kept = jnp.dtype(place.compute or wire)
                    if not is_quantized(wire):
                        kept = min(kept, wire, key=lambda dtype: dtype.itemsize)
                    share = (1 - 1 / group) / (1 - 1 / shards)
                    add("all-gather", kept, again * moved * share)
            if not place.trainable or not is_float(x):
                continue
            # A gradient has the dtype that the weight arrived in.
            arrived = x.dtype if is_quantized(wire) else wire
            reduce = jnp.dtype(place.reduce or place.compute or arrived)
            by_parts = place.sum not in (None, reduce)
            add("all-to-all" if by_parts else "reduce-scatter", reduce, moved)
            if copies > 1:
                add("all-reduce", place.sum or reduce, shard * 2 * (1 - 1 / copies))
    return {key: size for key, size in found.items() if size}


def _gathered_again(policy: UnitPolicy, length: int, prefetch: bool) -> int:
    """How many of a Stack's layers the backward gathers."""
    ahead = prefetch if policy.prefetch is None else policy.prefetch
    return sum(
        stop - start - (ahead and stop - start > 1)
        for start, stop in spans(policy, length)
        if start < length - policy.keep_last
    )


def _xla_name(dtype: str) -> str:
    return {"bfloat16": "bf16", "int8": "s8"}.get(dtype, dtype.replace("float", "f"))
