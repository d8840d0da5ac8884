"""What an instruction costs: the model behind the timeline.

Kernels by a roofline (Williams et al. 2009, doi:10.1145/1498765.1498785): the longer of
their matrix products at a share of the peak and their traffic at a share of the
memory's bandwidth, and a launch each. Collectives by alpha-beta (Hockney 1994): a
latency, and the bytes on the wire over the bandwidth of the slowest link they cross.
The latency grows with the devices as in NCCL's own model of rings and trees, with the
fastest of its protocols (``plan.cost.nccl``). Host copies by the bandwidth of the
bus. The constants are ``plan.constants``.
"""

import dataclasses
import math
import re
from typing import Any

from jshard.plan.constants import STATED, Constants
from jshard.plan.cost import nccl
from jshard.plan.hlo.hlo import HOST_SPACE, Computation, Instruction, Module
from jshard.plan.topology import GPU, GPUS_A_HOST

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# What takes no time: names for values, not kernels.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "partition-id", "replica-id", "domain", "add-dependency",
}  # fmt: skip
# Peak of matrix products relative to bf16; float32 ones run in TF32 by default.
_RATES = {"f64": 0.068, "f32": 0.5, "s8": 2.0, "u8": 2.0}


def assumptions(constants: Constants = STATED) -> dict[str, Any]:
    """The constants of the model by name: shares, seconds, and bytes a second."""
    return {
        "source": constants.source,
        "matrix_products_of_peak": constants.matmul,
        "attention_of_peak": constants.attention,
        "memory_of_bandwidth": constants.memory,
        "nvlink_of_bandwidth": constants.link,
        "network_bytes_per_second_a_gpu": constants.network_port,
        "host_bus_bytes_per_second": constants.host_bus,
        "kernel_launch_seconds": constants.launch,
        "network_post_seconds": nccl.POST,
        "rings": [dataclasses.asdict(protocol) for protocol in nccl.RINGS],
        "trees": [dataclasses.asdict(protocol) for protocol in nccl.TREES],
    }


def assumed(constants: Constants = STATED) -> str:
    """The same in a sentence, without trees."""
    rings = ", ".join(
        f"{ring.name} ({ring.latency * 1e6:.2g} us, {ring.step * 1e6:.2g} a step over "
        f"NVLink, {ring.network_step * 1e6:.2g} over the network, {ring.share:.0%} of "
        "the bandwidth)"
        for ring in nccl.RINGS
    )
    return (
        f"matrix products at {constants.matmul:.0%} of the dense bf16 peak, attention "
        f"at {constants.attention:.0%}, memory at {constants.memory:.0%} of its "
        f"bandwidth, NVLink at {constants.link:.0%}, a network port of "
        f"{constants.network_port / 1e9:.2f} GB/s a GPU, "
        f"{constants.host_bus / 1e9:.0f} GB/s to the host, "
        f"{constants.launch * 1e6:.2g} us a kernel ({constants.source}), and "
        f"collectives by the fastest of NCCL's protocols: {rings}"
    )


@dataclasses.dataclass(frozen=True)
class Work:
    """What one kernel does.

    Attributes:
      kind: "matrix product", "attention" or "memory".
      flops: of matrix products, in bf16's time.
      bytes: read and written in device memory.
      host_bytes: read and written in host memory.
    """

    kind: str
    flops: float
    bytes: int
    host_bytes: int = 0

    def seconds(self, gpu: GPU) -> float:
        """How long it runs."""
        reached = gpu.constants
        share = reached.attention if self.kind == "attention" else reached.matmul
        busy = max(
            self.flops / (share * gpu.flops),
            self.bytes / (reached.memory * gpu.bandwidth),
            self.host_bytes / reached.host_bus,
        )
        return busy + reached.launch


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective.

    Attributes:
      kind: of ``KINDS``.
      dtypes: bytes of each dtype on the wire: what a device receives.
      group: devices that take part together.
      in_host: how many of them share a host with each other.
    """

    kind: str
    dtypes: tuple[tuple[str, int], ...]
    group: int
    in_host: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device receives."""
        return sum(nbytes for _, nbytes in self.dtypes)

    @property
    def network(self) -> bool:
        """Whether it leaves the host."""
        return self.group > self.in_host

    @property
    def network_bytes(self) -> int:
        """Bytes that come in through a device's own network port.

        A ring crosses the network once a host, so that the ports of its devices share
        what each of them receives. In an all-to-all the other hosts' devices send to
        each device what is its own; of a permutation all may come from another host.
        """
        if not self.network:
            return 0
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            others = self.group - self.in_host
            return round(self.wire_bytes * others / (self.group - 1))
        if self.kind == "collective-permute":
            return self.wire_bytes
        return round(self.wire_bytes / self.in_host)

    def seconds(self, gpu: GPU) -> float:
        """How long it runs with the links to itself.

        Along a ring of n devices on h hosts there are n - 1 steps, of which h - 1 cross
        the network. An all-reduce goes round twice, or up and down a binary tree of
        hosts with a chain in each. Of these ways and NCCL's protocols it takes the
        fastest. What goes straight from device to device has the Simple protocol: a
        permutation is one step; an all-to-all is taken to have those of a ring.
        """
        hosts = math.ceil(self.group / self.in_host)
        inside, between = self.group - hosts, hosts - 1
        wire = max(
            self.wire_bytes / (gpu.constants.link * gpu.nvlink),
            self.network_bytes / gpu.constants.network_port,
        )
        if self.kind == "collective-permute":
            return nccl.SIMPLE.seconds(not self.network, self.network, wire)
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            return nccl.SIMPLE.seconds(inside, between, wire)
        received = self.wire_bytes if self.network else 0
        turns = 2 if self.kind == "all-reduce" else 1
        times = [
            ring.seconds(turns * inside, turns * between, wire, received)
            for ring in nccl.rings(self.in_host, self.network)
        ]
        if self.kind == "all-reduce":
            chain, depth = self.in_host - 1, hosts.bit_length() - 1
            times += [
                tree.seconds(2 * chain, 2 * depth, wire, received)
                for tree in nccl.TREES
            ]
        return min(times)


def transfer(
    module: Module, computation: Computation, x: Instruction, num_devices: int
) -> Transfer | None:
    """A collective, or the start of one; None for another instruction."""
    inner = _wrapped(module, x)
    if inner is not None:
        return transfer(module, *inner, num_devices)
    kind = x.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = x.groups or (tuple(range(num_devices)),)
    group = max(map(len, groups))
    in_host = max(
        len([d for d in groups[0] if d // GPUS_A_HOST == host])
        for host in {d // GPUS_A_HOST for d in groups[0]}
    )
    # Results can hold operands, too (all-gather-start); operands are what is put in.
    given = [
        array
        for name in x.operands
        for array in computation.by_name[name].arrays
        if array.dtype != "token"
    ]
    scale = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }.get(kind, (group - 1) / group)
    sizes: dict[str, float] = {}
    for array in given:
        sizes[array.dtype] = sizes.get(array.dtype, 0) + array.bytes * scale
    dtypes = tuple((dtype, round(nbytes)) for dtype, nbytes in sizes.items())
    return Transfer(kind, dtypes, group, in_host)


def is_start(x: Instruction) -> bool:
    """Whether it begins what a ``-done`` waits for."""
    return x.opcode.endswith("-start") and '"is_sync":true' not in x.text


def _wrapped(module: Module, x: Instruction) -> tuple[Computation, Instruction] | None:
    """The instruction inside an ``async-start``."""
    if x.opcode != "async-start":
        return None
    inside = next(module.inside(x))
    return inside, inside.root


def work(module: Module, computation: Computation, x: Instruction) -> Work:
    """What a kernel does: a fusion, a custom call, a copy, ..."""
    if x.target.startswith("__cudnn$fmha"):
        return _attention(computation, x)
    flops = _flops(module, computation, x)
    nbytes = [0, 0]
    for array, size in _traffic(module, computation, x):
        nbytes[array] += size
    kind = "matrix product" if flops else "memory"
    return Work(kind, flops, nbytes[0], nbytes[1])


def _attention(computation: Computation, x: Instruction) -> Work:
    """Flash attention: products of queries, keys, values, half of them masked.

    Forward 2 products of B x N x T x S x H, backward 5 (Dao 2023, arXiv:2307.08691,
    section 3).
    """
    dims = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[(.*?)\]', x.text)
    if dims is None:
        raise ValueError(f"{x.name}: an attention call without the shape of its scores")
    scores = math.prod(int(n.strip(' "')) for n in dims[1].split(","))
    width = computation.by_name[x.operands[0]].arrays[0].shape[-1]
    products = 5 if "Backward" in x.target else 2
    causal = 0.5 if '"mask_type": "CAUSAL"' in x.text else 1.0
    operands = sum(computation.by_name[name].bytes for name in x.operands)
    flops = 2.0 * products * scores * width * causal
    return Work("attention", flops, operands + x.bytes)


def _flops(module: Module, computation: Computation, x: Instruction) -> float:
    """Of the matrix products in an instruction and what it calls."""
    if x.opcode == "dot" or "matmul" in x.target or "gemm" in x.target:
        return _dot_flops(computation, x)
    if x.opcode not in ("fusion", "fusion-start", "call", "custom-call"):
        return 0.0
    return sum(
        _flops(module, inside, y)
        for inside in module.inside(x)
        for y in inside.instructions
    )


def _dot_flops(computation: Computation, x: Instruction) -> float:
    lhs = computation.by_name[x.operands[0]].arrays[0]
    contracted = x.attribute("lhs_contracting_dims")
    if not contracted:  # of a custom call, in its backend_config
        found = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', x.text)
        contracted = (int(found[1]),) if found else (len(lhs.shape) - 1,)
    depth = math.prod(lhs.shape[d] for d in contracted)
    rate = 2.0 if lhs.dtype.startswith("f8") else _RATES.get(lhs.dtype, 1.0)
    return 2.0 * x.arrays[0].size * depth / rate


def _traffic(module: Module, computation: Computation, x: Instruction):
    """(is it host memory, bytes) of what an instruction reads and writes.

    A fusion that only slices an operand reads the slice; one that updates an operand
    in place writes the update.
    """
    fused = x.opcode in ("fusion", "fusion-start")
    inside = module.body(x, "calls") if fused else None
    written = set()
    if inside is not None:
        for target, update in _updates(inside):
            written.add(target)
            for array in update.arrays:
                yield array.space == HOST_SPACE, array.bytes
    elif x.opcode == "dynamic-update-slice":
        update = computation.by_name[x.operands[1]]
        space = x.arrays[0].space
        yield space == HOST_SPACE, 2 * update.bytes
        return
    elif x.opcode in ("dynamic-slice", "gather", "slice"):
        spaces = {a.space for a in computation.by_name[x.operands[0]].arrays}
        yield HOST_SPACE in spaces, 2 * x.bytes
        return
    for number, name in enumerate(x.operands):
        operand = computation.by_name[name]
        nbytes = operand.bytes
        if inside is not None:
            parameter = inside.parameter(number)
            nbytes = _read(inside, parameter, parameter.name in written)
        space = operand.arrays[0].space if operand.arrays else 0
        yield space == HOST_SPACE, nbytes
    # An asynchronous one's own type holds its operands, too.
    results = list(x.arrays if inside is None else inside.root.arrays)
    for name in written:  # in place: as large, if with another shape, and not written
        nbytes = inside.by_name[name].bytes if inside else 0
        whole = next((i for i, a in enumerate(results) if a.bytes == nbytes), None)
        if whole is not None:
            results.pop(whole)
    for array in results:
        yield array.space == HOST_SPACE, array.bytes


def _read(inside: Computation, parameter: Instruction, updated: bool) -> int:
    """Bytes of a fusion's parameter that it reads."""
    total = 0
    for user in _real_users(inside, parameter):
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and updated:
            total += 0
        else:
            return parameter.bytes
    return min(total, parameter.bytes)


def _real_users(inside: Computation, x: Instruction):
    for user in inside.users[x.name]:
        if user.opcode == "bitcast":
            yield from _real_users(inside, user)
        else:
            yield user


def _updates(inside: Computation):
    """(the parameter, the update) of each result that is updated in place."""
    roots = [inside.root]
    if inside.root.opcode == "tuple":
        roots = [inside.by_name[name] for name in inside.root.operands]
    for root in roots:
        while root.opcode == "bitcast":
            root = inside.by_name[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            continue
        target = inside.by_name[root.operands[0]]
        while target.opcode == "bitcast":
            target = inside.by_name[target.operands[0]]
        if target.opcode == "parameter":
            yield target.name, inside.by_name[root.operands[1]]
