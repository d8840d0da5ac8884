"""The collectives of a compiled program, and how long each takes.

Alpha-beta (Hockney 1994): a latency, plus the bytes on the wire over the bandwidth of
the slowest link they cross. The latency grows with the number of devices as in NCCL's
own model of rings and trees, by the fastest of its protocols (``plan.cost.nccl``).
"""

import collections
import math
from typing import NamedTuple

from jshard.plan.cost import nccl
from jshard.plan.fit.hardware import GPU
from jshard.plan.hlo import Computation, Instruction, Module

_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    *_ALL_TO_ALL,
    "collective-permute",
    "collective-broadcast",
)


class Transfer(NamedTuple):
    """One collective."""

    kind: str  # one of `KINDS`
    dtypes: tuple[tuple[str, int], ...]  # bytes that a device receives, by dtype
    group: int  # number of devices that take part
    in_host: int  # how many of them share a host, or an NVLink domain of hosts
    groups: tuple[tuple[int, ...], ...] = ()  # of devices; pairs, of a permutation

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device receives."""
        return sum(nbytes for _, nbytes in self.dtypes)

    @property
    def network(self) -> bool:
        """Whether it spans several hosts."""
        return self.group > self.in_host

    @property
    def hosts(self) -> int:
        """The number of hosts that it spans."""
        return math.ceil(self.group / self.in_host)

    @property
    def network_bytes(self) -> int:
        """Bytes that arrive through a device's own network port.

        A ring enters each host once, so the ports of its devices share what each of
        them receives. In an all-to-all, devices on other hosts send each device its own
        part. In a permutation everything may come from another host.
        """
        if not self.network:
            return 0
        if self.kind in _ALL_TO_ALL:
            others = self.group - self.in_host
            return round(self.wire_bytes * others / (self.group - 1))
        if self.kind == "collective-permute":
            return self.wire_bytes
        return round(self.wire_bytes / self.in_host)

    def seconds(self, gpu: GPU) -> float:
        """How long it runs with the links to itself.

        A ring of n devices on h hosts takes n - 1 steps, of which h - 1 cross the
        network. An all-reduce goes round twice, or up and down a binary tree of hosts
        with a chain in each. The fastest of these algorithms and of NCCL's protocols
        counts. Direct sends use the Simple protocol: a permutation is one step, and an
        all-to-all is charged the steps of a ring.
        """
        inside, between = self.group - self.hosts, self.hosts - 1
        wire = max(
            gpu.link_seconds(self.wire_bytes),
            self.network_bytes / gpu.network_port,
        )
        if self.kind == "collective-permute":
            return nccl.SIMPLE.seconds(not self.network, self.network, wire)
        if self.kind in _ALL_TO_ALL:
            return nccl.SIMPLE.seconds(inside, between, wire)
        received = self.wire_bytes if self.network else 0
        turns = 2 if self.kind == "all-reduce" else 1
        times = [
            ring.seconds(turns * inside, turns * between, wire, received)
            for ring in nccl.rings(self.in_host, self.network)
        ]
        if self.kind == "all-reduce":
            chain, depth = self.in_host - 1, self.hosts.bit_length() - 1
            times += [
                tree.seconds(2 * chain, 2 * depth, wire, received)
                for tree in nccl.TREES
            ]
        return min(times)


def transfer(
    module: Module,
    computation: Computation,
    x: Instruction,
    num_devices: int,
    near: int,
) -> Transfer | None:
    """Returns a collective, or the start of one; None for another instruction.

    Of ``num_devices``, each ``near`` neighbours are joined by more than a network.
    """
    if x.opcode == "async-start":
        computation = next(module.inside(x))
        x = computation.root
    kind = x.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = x.groups or (tuple(range(num_devices)),)
    # Of pairs, one that crosses hosts, if any does.
    widest = max(groups, key=lambda group: len({device // near for device in group}))
    group = max(map(len, groups))
    hosts = collections.Counter(device // near for device in widest)
    scale = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }.get(kind, (group - 1) / group)
    # Sizes are those of the operands: the result of an all-gather-start has both.
    sizes: dict[str, float] = collections.defaultdict(float)
    for array in computation.given(x):
        if array.dtype != "token":
            sizes[array.dtype] += array.bytes * scale
    dtypes = tuple((dtype, round(nbytes)) for dtype, nbytes in sizes.items())
    return Transfer(kind, dtypes, group, max(hosts.values()), groups)
