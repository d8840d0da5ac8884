"""The work of a kernel, and how long it takes.

Kernels follow a roofline (Williams et al. 2009, doi:10.1145/1498765.1498785): the
longer of their matrix products, at a share of the peak, and their memory traffic, at a
share of the bandwidth, plus a launch. The constants are in ``fit.hardware``.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jshard.plan.cost import convolution
from jshard.plan.fit.hardware import FP4, GPU
from jshard.plan.hlo import Computation, Instruction, Module

# Kinds of kernels that no roofline describes, followed by the custom call's target:
# those of Pallas, for example. Only their traffic counts.
UNKNOWN = "unknown kernel "
MATRIX, FLOAT32, FLOAT8 = "matrix product", "float32 product", "float8 product"
MXFP8 = "MXFP8 product"  # float8 with a scale for each 32 values
NVFP4 = "NVFP4 product"  # four bits with a scale for each 16
ATTENTION, MEMORY = "attention", "memory"
# The constant that limits each kind.
LIMITS = {
    MATRIX: "matmul",
    FLOAT32: "matmul",
    FLOAT8: "float8",
    MXFP8: "mxfp8",
    NVFP4: "nvfp4",
    ATTENTION: "attention",
    MEMORY: "memory",
}
# Custom calls of libraries: cuBLAS, cuDNN, CUB, cuSOLVER, cuFFT.
_OF_LIBRARIES = ("__cu", "cu", "AllocateBuffer")
_BLOCKS = "__cudnn$blockScaledDot"
_MATMUL = re.compile(f"matmul|gemm|{re.escape(_BLOCKS)}")
_SLICES = ("dynamic-slice", "slice", "gather")
# Peak of matrix products relative to bf16; float32 ones run in TF32 by default.
_RATES = {"f64": 0.068, "f32": 0.5, "s8": 2.0, "u8": 2.0, "f4e2m1fn": FP4}


class Work(NamedTuple):
    """The work of one kernel."""

    kind: str  # one of `LIMITS`, or `UNKNOWN` and a target
    flops: float  # of products and convolutions, scaled to the rate of bf16 products
    bytes: int  # read and written in device memory
    host_bytes: int = 0  # the same in host memory

    def seconds(self, gpu: GPU) -> float:
        """How long it runs."""
        busy = max(
            gpu.product_seconds(self.flops, LIMITS.get(self.kind, "matmul")),
            gpu.memory_seconds(self.bytes),
            self.host_bytes / gpu.host_bus,
        )
        return busy + gpu.constants.launch


def work(module: Module, computation: Computation, x: Instruction) -> Work:
    """Returns the work of a kernel: a fusion, a custom call, a copy, ..."""
    if x.target.startswith("__cudnn$fmha"):
        return _attention(computation, x)
    flops = _flops(module, computation, x)
    nbytes = [0, 0]
    for on_host, size in _traffic(module, computation, x):
        nbytes[on_host] += size
    kind = _kind(_dtype(module, computation, x)) if flops else MEMORY
    if x.target == _BLOCKS:
        kind = NVFP4 if computation.given(x)[0].dtype.startswith("f4") else MXFP8
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
    given = computation.given(x)
    products = 5 if "Backward" in x.target else 2
    pairs = 1.0 * queries * keys
    if re.search(r'"mask_type": "(PADDING_)?CAUSAL"', x.text):
        found = re.search(r'"sliding_window_length": (\d+)', x.text)
        window = min(int(found[1]) if found else 0, queries) or queries
        pairs = window * (queries - window / 2)
    flops = 2.0 * products * batch * heads * pairs * given[0].shape[-1]
    return Work(ATTENTION, flops, sum(array.bytes for array in given) + x.bytes)


def _flops(module: Module, computation: Computation, x: Instruction) -> float:
    """FLOPs of the products in an instruction and in what it calls."""
    if _is_dot(x):
        return _dot_flops(computation, x)
    if convolution.is_convolution(x):
        rate = _rate(computation.given(x)[0].dtype) * convolution.filled(computation, x)
        return convolution.flops(computation, x) / rate
    if x.opcode not in ("fusion", "fusion-start", "call", "custom-call"):
        return 0.0
    return sum(
        _flops(module, inside, y)
        for inside in module.inside(x)
        for y in inside.instructions
    )


def _dtype(module: Module, computation: Computation, x: Instruction) -> str:
    """Of the numbers that the products in an instruction multiply; "" without any."""
    if _is_dot(x) or convolution.is_convolution(x):
        return computation.given(x)[0].dtype
    found = (
        _dtype(module, inside, y)
        for inside in module.inside(x)
        for y in inside.instructions
    )
    return next(filter(None, found), "")


def _kind(dtype: str) -> str:
    """Of products of a dtype."""
    if dtype.startswith("f8"):
        return FLOAT8
    return FLOAT32 if dtype in ("f32", "f64") else MATRIX


def _is_dot(x: Instruction) -> bool:
    return x.opcode == "dot" or bool(_MATMUL.search(x.target))


def _dot_flops(computation: Computation, x: Instruction) -> float:
    lhs = computation.given(x)[0]
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
    changed = dict(updates(inside)) if inside else {}
    for number, operand in enumerate(operands):
        nbytes = operand.bytes
        if inside is not None:
            parameter = inside.parameters[number]
            nbytes = _read(inside, parameter, parameter.name in changed)
        yield bool(operand.arrays) and operand.arrays[0].on_host, nbytes
    # The type of an asynchronous fusion holds its operands, too.
    results = list(x.arrays if inside is None else inside.root.arrays)
    for target, update in changed.items():
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


def updates(inside: Computation) -> Iterator[tuple[str, Instruction]]:
    """(the parameter's name, the update) of each result that is updated in place."""

    def without_bitcast(x: Instruction) -> Instruction:
        while x.opcode == "bitcast":
            x = inside.by_name[x.operands[0]]
        return x

    root = without_bitcast(inside.root)
    names = root.operands if root.opcode == "tuple" else [root.name]
    for result in (without_bitcast(inside.by_name[name]) for name in names):
        if result.opcode == "dynamic-update-slice":
            target, update = (inside.by_name[name] for name in result.operands[:2])
            target = without_bitcast(target)
            if target.opcode == "parameter":
                yield target.name, update
