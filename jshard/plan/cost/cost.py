"""The cost of an instruction: the model behind the timeline.

Kernels follow a roofline (Williams et al. 2009, doi:10.1145/1498765.1498785): the
longer of their matrix products, at a share of the peak, and their memory traffic, at a
share of the bandwidth, plus a launch. Collectives follow alpha-beta (Hockney 1994): a
latency, plus the bytes on the wire over the bandwidth of the slowest link they cross.
The latency grows with the number of devices as in NCCL's own model of rings and trees,
by the fastest of its protocols (``plan.cost.nccl``). Copies to and from the host take
the bandwidth of the bus. The constants are in ``plan.constants``.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jshard.plan.constants import FITTED, Constants
from jshard.plan.cost import convolution, nccl
from jshard.plan.hlo.hlo import Computation, Instruction, Module
from jshard.plan.topology import GPU, GPUS_A_HOST

_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    *_ALL_TO_ALL,
    "collective-permute",
    "collective-broadcast",
)
# Instructions that take no time: names for values, not kernels.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "partition-id", "replica-id", "domain", "add-dependency",
}  # fmt: skip
# Kinds of kernels that no roofline describes, followed by the custom call's target:
# those of Pallas, for example. Only their traffic counts.
UNKNOWN = "unknown kernel "
# Custom calls of libraries: cuBLAS, cuDNN, CUB, cuSOLVER, cuFFT.
_OF_LIBRARIES = ("__cu", "cu", "AllocateBuffer")
_SLICES = ("dynamic-slice", "slice", "gather")
# Peak of matrix products relative to bf16; float32 ones run in TF32 by default.
_RATES = {"f64": 0.068, "f32": 0.5, "s8": 2.0, "u8": 2.0}


def assumptions(constants: Constants = FITTED) -> dict[str, Any]:
    """The model's constants by name: shares, seconds, and bytes/s."""
    return {
        "source": constants.source,
        "measured_over_predicted": [constants.low, constants.high],
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


def assumed(constants: Constants = FITTED) -> str:
    """The same in a sentence, without the trees."""
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
    """The work of one kernel.

    Attributes:
      kind: "matrix product", "attention", "memory", or ``UNKNOWN`` and a target.
      flops: of matrix products and convolutions, scaled to the rate of bf16 products.
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
      kind: one of ``KINDS``.
      dtypes: bytes that a device receives, by dtype on the wire.
      group: number of devices that take part.
      in_host: how many of them share a host.
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
        """Whether it spans several hosts."""
        return self.group > self.in_host

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
        hosts = math.ceil(self.group / self.in_host)
        inside, between = self.group - hosts, hosts - 1
        wire = max(
            self.wire_bytes / (gpu.constants.link * gpu.nvlink),
            self.network_bytes / gpu.constants.network_port,
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
            chain, depth = self.in_host - 1, hosts.bit_length() - 1
            times += [
                tree.seconds(2 * chain, 2 * depth, wire, received)
                for tree in nccl.TREES
            ]
        return min(times)


def transfer(
    module: Module, computation: Computation, x: Instruction, num_devices: int
) -> Transfer | None:
    """Returns a collective, or the start of one; None for another instruction."""
    if x.opcode == "async-start":
        computation = next(module.inside(x))
        x = computation.root
    kind = x.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = x.groups or (tuple(range(num_devices)),)
    group = max(map(len, groups))
    hosts = collections.Counter(device // GPUS_A_HOST for device in groups[0])
    scale = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }.get(kind, (group - 1) / group)
    # Sizes are those of the operands: the result of an all-gather-start has both.
    sizes: dict[str, float] = {}
    for name in x.operands:
        for array in computation.by_name[name].arrays:
            if array.dtype != "token":
                sizes[array.dtype] = sizes.get(array.dtype, 0) + array.bytes * scale
    dtypes = tuple((dtype, round(nbytes)) for dtype, nbytes in sizes.items())
    return Transfer(kind, dtypes, group, max(hosts.values()))


def work(module: Module, computation: Computation, x: Instruction) -> Work:
    """Returns the work of a kernel: a fusion, a custom call, a copy, ..."""
    if x.target.startswith("__cudnn$fmha"):
        return _attention(computation, x)
    flops = _flops(module, computation, x)
    nbytes = [0, 0]
    for on_host, size in _traffic(module, computation, x):
        nbytes[on_host] += size
    kind = "matrix product" if flops else "memory"
    if x.opcode == "custom-call" and not flops:
        if not x.target.startswith(_OF_LIBRARIES):
            kind = f"{UNKNOWN}{x.target}"
    return Work(kind, flops, *nbytes)


def _attention(computation: Computation, x: Instruction) -> Work:
    """Flash attention: products of queries, keys and values, where the mask has any.

    The forward has 2 products of B x N x T x S x H, the backward 5 (Dao 2023,
    arXiv:2307.08691, section 3). Causal ones are half, and with a window of W keys
    W (T - W / 2) of T x S. Packed documents count as one: their lengths are data.
    """
    dims = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[(.*?)\]', x.text)
    if dims is None:
        raise ValueError(f"{x.name}: an attention call without the shape of its scores")
    batch, heads, queries, keys = (int(n.strip(' "')) for n in dims[1].split(","))
    width = computation.by_name[x.operands[0]].arrays[0].shape[-1]
    products = 5 if "Backward" in x.target else 2
    pairs = 1.0 * queries * keys
    if re.search(r'"mask_type": "(PADDING_)?CAUSAL"', x.text):
        found = re.search(r'"sliding_window_length": (\d+)', x.text)
        window = min(int(found[1]) if found else 0, queries) or queries
        pairs = window * (queries - window / 2)
    operands = sum(computation.by_name[name].bytes for name in x.operands)
    flops = 2.0 * products * batch * heads * pairs * width
    return Work("attention", flops, operands + x.bytes)


def _flops(module: Module, computation: Computation, x: Instruction) -> float:
    """FLOPs of the products in an instruction and in what it calls."""
    if x.opcode == "dot" or "matmul" in x.target or "gemm" in x.target:
        return _dot_flops(computation, x)
    if convolution.is_convolution(x):
        rate = _rate(computation.by_name[x.operands[0]].arrays[0].dtype)
        rate *= convolution.filled(computation, x)
        return convolution.flops(computation, x) / rate
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
    if not contracted:  # a custom call has them in its backend_config
        found = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', x.text)
        contracted = (int(found[1]),) if found else (len(lhs.shape) - 1,)
    depth = math.prod(lhs.shape[d] for d in contracted)
    return 2.0 * x.arrays[0].size * depth / _rate(lhs.dtype)


def _rate(dtype: str) -> float:
    """Peak of products of a dtype, relative to bf16."""
    return 2.0 if dtype.startswith("f8") else _RATES.get(dtype, 1.0)


def _traffic(
    module: Module, computation: Computation, x: Instruction
) -> Iterator[tuple[bool, int]]:
    """(whether in host memory, bytes) of everything an instruction reads and writes.

    A fusion that only slices an operand reads the slice; one that updates an operand
    in place writes the update.
    """
    operands = [computation.by_name[name] for name in x.operands]
    if x.opcode == "dynamic-update-slice":
        yield x.arrays[0].on_host, 2 * operands[1].bytes
        return
    if x.opcode in _SLICES:
        yield any(a.on_host for a in operands[0].arrays), 2 * x.bytes
        return
    inside = module.body(x, "calls") if x.opcode in ("fusion", "fusion-start") else None
    updates = dict(_updates(inside)) if inside else {}
    for number, operand in enumerate(operands):
        nbytes = operand.bytes
        if inside is not None:
            parameter = inside.parameters[number]
            nbytes = _read(inside, parameter, parameter.name in updates)
        yield bool(operand.arrays) and operand.arrays[0].on_host, nbytes
    # The type of an asynchronous fusion holds its operands, too.
    results = list(x.arrays if inside is None else inside.root.arrays)
    for target, update in updates.items():
        for array in update.arrays:
            yield array.on_host, array.bytes
        # The result in place of the target is as large, and written only there.
        nbytes = inside.by_name[target].bytes if inside else 0
        whole = next((i for i, a in enumerate(results) if a.bytes == nbytes), None)
        if whole is not None:
            results.pop(whole)
    for array in results:
        yield array.on_host, array.bytes


def _read(inside: Computation, parameter: Instruction, updated: bool) -> int:
    """Bytes that a fusion reads of a parameter, in the parameter's own dtype."""
    total, itemsize = 0, parameter.bytes / max(parameter.arrays[0].size, 1)
    for user in _real_users(inside, parameter):
        if user.opcode in _SLICES:
            total += round(user.arrays[0].size * itemsize)
        elif not (updated and user.opcode == "dynamic-update-slice"):
            return parameter.bytes
    return min(total, parameter.bytes)


def _real_users(inside: Computation, x: Instruction) -> Iterator[Instruction]:
    """Looks through casts: a fusion casts only the elements that are used."""
    for user in inside.users(x.name):
        if user.opcode in ("bitcast", "convert"):
            yield from _real_users(inside, user)
        else:
            yield user


def _updates(inside: Computation) -> Iterator[tuple[str, Instruction]]:
    """(the parameter's name, the update) of each result that is updated in place."""

    def operand(x: Instruction, number: int) -> Instruction:
        """An instruction's operand, without bitcasts."""
        found = inside.by_name[x.operands[number]]
        return operand(found, 0) if found.opcode == "bitcast" else found

    root = inside.root
    while root.opcode == "bitcast":
        root = operand(root, 0)
    results = [root]
    if root.opcode == "tuple":
        results = [operand(root, n) for n in range(len(root.operands))]
    for result in results:
        if result.opcode == "dynamic-update-slice":
            target = operand(result, 0)
            if target.opcode == "parameter":
                yield target.name, inside.by_name[result.operands[1]]
