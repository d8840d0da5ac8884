"""The traffic of a step: the compiled program's collectives, and the least possible.

``count`` reads XLA's program, with loops unrolled, so it includes what the partitioner
and the compiler added or combined. ``least`` follows from the state and the policy
alone: what no fully sharded step can avoid.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from jshard.plan.cost.ticks import Pipeline
from jshard.plan.cost.transfers import Transfer, transfer
from jshard.plan.fit.hardware import GPU
from jshard.plan.hlo import Computation, Instruction, Module
from jshard.sharding.layout.capacity import shard_size
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.specs import LOOKED_UP
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.settings.mesh import REPLICA, names_of, shard_axes, stages_of
from jshard.sharding.settings.policy import Policy, UnitPolicy
from jshard.sharding.settings.precision import PRODUCTS, is_float, is_quantized
from jshard.sharding.settings.state import TrainState
from jshard.sharding.units.layers import spans

NETWORK, SHARED = "network", "shared memory"


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind, with the same dtypes, over the same link."""

    kind: str  # "all-gather", "reduce-scatter", ...
    dtype: str  # on the wire, by XLA's name; "bf16+f32" if a collective moves several
    link: str  # within a host, between hosts, or on CPUs
    group: int  # number of devices that take part
    count: int  # runs per step
    bytes: int  # received by a device per step
    # Those that arrive through the device's own network port. The rest comes over
    # NVLink (or PCIe) from the devices of the same host or domain.
    network_bytes: int
    seconds: float | None  # with idle links; None if their speed is unknown


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of a step."""

    rows: tuple[Row, ...]  # sorted by bytes, largest first
    # Bytes that a device must receive because of the sharding itself.
    least: dict[tuple[str, str], int]  # by (kind, dtype)

    @property
    def bytes(self) -> int:
        """Bytes that a device receives per step."""
        return sum(row.bytes for row in self.rows)

    @property
    def network_bytes(self) -> int:
        """Those that arrive through the device's own network port."""
        return sum(row.network_bytes for row in self.rows)

    @property
    def least_bytes(self) -> int:
        """The least bytes that a device must receive per step."""
        return sum(self.least.values())


def count(
    module: Module,
    num_devices: int,
    gpu: GPU | None,
    pipeline: Pipeline | None = None,
    stage: int = 0,
) -> tuple[Row, ...]:
    """Counts the collectives of a compiled program, except in groups of one device.

    ``gpu`` is that of its ``num_devices`` devices; None for CPUs. Of a ``pipeline``
    they are those of a device of this ``stage``.
    """
    found: dict[tuple, list[tuple[Transfer, float]]] = collections.defaultdict(list)
    near = num_devices if gpu is None else gpu.domain
    of_stage = pipeline and functools.partial(pipeline.shares, device=stage)
    for _, moved, times in transfers(module, module.entry, num_devices, near, of_stage):
        if moved.group > 1:
            link = SHARED if gpu is None else NETWORK if moved.network else gpu.links
            dtype = "+".join(sorted(name for name, _ in moved.dtypes))
            found[moved.kind, dtype, link, moved.group].append((moved, times))
    rows = [
        Row(
            *key,
            count=round(sum(n for _, n in same)),
            bytes=round(sum(n * moved.wire_bytes for moved, n in same)),
            network_bytes=round(
                sum(n * moved.network_bytes for moved, n in same if gpu)
            ),
            seconds=sum(n * moved.seconds(gpu) for moved, n in same) if gpu else None,
        )
        for key, same in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def transfers(
    module: Module,
    computation: Computation,
    num_devices: int,
    near: int,
    shares: Callable[[Instruction], Iterable[tuple[str, float]]] | None = None,
    times: float = 1,
) -> Iterator[tuple[Instruction, Transfer, float]]:
    """Yields each collective, and how often it runs, on average of its copies.

    ``near`` devices share a link; ``shares`` are those of a pipeline's conditionals.
    """
    for x in computation.instructions:
        if moved := transfer(module, computation, x, num_devices, near):
            yield x, moved, times
        elif x.opcode == "while":
            trips = times * module.trips(x)
            inside = module.body(x)
            yield from transfers(module, inside, num_devices, near, shares, trips)
        elif x.opcode == "conditional" and shares:
            for name, share in shares(x):
                inside, often = module.computations[name], share * times
                if often:
                    yield from transfers(
                        module, inside, num_devices, near, shares, often
                    )
        elif x.opcode in ("call", "conditional"):
            for inside in module.inside(x):
                yield from transfers(module, inside, num_devices, near, shares, times)


def least(
    mesh: Any, policy: Policy, state: TrainState, *, prefetch: bool
) -> dict[tuple[str, str], int]:
    """Returns the bytes that a device must receive in a step, by (kind, dtype).

    Each sharded parameter is gathered once in the forward. A Stack's matrices, which
    its backward reads, are gathered again if they were resharded. Each gradient is
    scattered once and, with HSDP, its shard is summed over the replicas. All but that
    sum happens for every micro-batch, or once with ``defer_scatter``. A collective over
    n devices brings (n-1)/n of the full array (docs/memory.md).

    Not included: replicated parameters, looked-up embeddings, gathers in a Unit's
    backward (not every backward reads its weights), scales of one-byte gathers, the
    optimizer's own collectives, and exchanges of tokens and heads.

    Args:
      mesh: abstract or not.
      policy: of the step.
      state: abstract, with shardings.
      prefetch: whether layers are prefetched where the policy leaves it open. If so,
        the backward starts with the last layer's weights from the forward.
    """
    replicas, stages = mesh.shape[REPLICA], stages_of(mesh)
    prefetch = prefetch and stages == 1  # of many micro-batches all would be kept
    # Micro-batches that gather and scatter; 0 if that is outside of the loop over them.
    rounds = 0 if policy.defer_scatter else policy.accumulate
    places = Layout.of(state, policy, mesh).places
    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(kind: str, dtype: Any, elements: float) -> None:
        dtype = jnp.dtype(dtype)
        name = dtype.name.replace("float", "f")
        if dtype.itemsize == 1:  # int8 and float8 travel as bits
            name = "u8" if dtype == jnp.uint8 else "s8"
        found[kind, name] += round(elements * dtype.itemsize)

    for path, variable in state.flat_params():
        place, x = places[path], variable.get_value()
        looked_up = variable.get_metadata(LOOKED_UP, False)
        over = place.sharding.over or shard_axes(mesh)
        shards = math.prod(mesh.shape[axis] for axis in names_of(over))
        if place.sharding.dim is None or shards == 1 or (looked_up and rounds):
            continue
        shard, depth = shard_size(x), layer_dims(variable)
        shards //= stages
        if shards == 1 or (stages > 1 and not depth):
            continue
        kept = stages > 1 and policy.unit(path).reshard_after_forward is False
        moved = shard * (shards - 1) * (1 if kept else rounds or 1)
        # Not all of a Stack's matrices are in float8, but none can be narrower.
        float8 = place.weight.float8 if depth and x.ndim - depth > 1 else None
        width = PRODUCTS[float8] if float8 else 1.0  # of four bits bytes have two
        bits = "int8" if width == 1 else "uint8"
        wire = jnp.dtype(bits if float8 else place.weight.gather or x.dtype)
        add("all-gather", wire, moved * width)
        matrix = place.weight.four_bit is not None or x.ndim - depth > 1
        if depth and matrix and rounds:
            unit, length = policy.unit(path), x.shape[depth - 1]
            again = moved * width * _gathered_again(unit, length, prefetch) / length
            group = int(unit.reshard_after_forward)
            if unit.reshard_after_forward is True:
                add("all-gather", wire, again)
            elif group:  # from what each group keeps, in the smaller dtype
                kept = wire if float8 else jnp.dtype(place.weight.compute or wire)
                if not is_quantized(wire):
                    kept = min(kept, wire, key=lambda dtype: dtype.itemsize)
                share = (1 - 1 / group) / (1 - 1 / shards)
                add("all-gather", kept, again * share)
        if not place.gradient.trainable or not is_float(x):
            continue
        # A gradient has the dtype in which its weight arrived.
        arrived = x.dtype if is_quantized(wire) else wire
        reduce = jnp.dtype(place.gradient.reduce or place.weight.compute or arrived)
        by_parts = place.gradient.sum not in (None, reduce)
        add("all-to-all" if by_parts else "reduce-scatter", reduce, moved)
        if replicas > 1:
            add(
                "all-reduce",
                place.gradient.sum or reduce,
                shard * 2 * (1 - 1 / replicas),
            )
    return {key: size for key, size in found.items() if size}


def _gathered_again(policy: UnitPolicy, length: int, prefetch: bool) -> int:
    """Returns the number of a Stack's layers that the backward gathers."""
    prefetched = prefetch if policy.prefetch is None else policy.prefetch
    return sum(
        stop - start - (prefetched and stop - start > 1)
        for start, stop in spans(policy, length)
    )
