"""The products of convolutions: XLA's own, and its calls of cuDNN.

They are matrix products, at the same share of the peak (implicit GEMM: Chetlur et al.
2014, arXiv:1410.0759). Those with few channels in a group fill an instruction of the
tensor cores only in part.
"""

import math
import re

from jshard.plan.hlo import Array, Computation, Instruction

_CUDNN = "__cudnn$conv"
# Depth of the tensor cores' product of 16-bit numbers (PTX: mma.m16n8k16). It is also
# how much faster they are than the CUDA cores, which compute a depthwise convolution
# (data sheets: A100 312 and 19.5 TFLOP/s, H100 989 and 67).
_DEPTH = 16


def is_convolution(x: Instruction) -> bool:
    """Returns whether an instruction is a convolution or a call of cuDNN's."""
    return x.opcode == "convolution" or x.target.startswith(_CUDNN)


def flops(computation: Computation, x: Instruction) -> float:
    """Returns the FLOPs of a convolution.

    Each element of the output sums over the taps of the kernel and the input channels
    of its group. The gradients by input and by kernel have as many. Taps in the padding
    count: cuDNN does not skip them. Holes of a dilated input do not.
    """
    output, kernel, (_, size_out) = _roles(computation, x)
    found = re.search(r"lhs_dilate=([\dx]+)", x.text)
    dilation = math.prod(map(int, found[1].split("x"))) if found else 1
    return 2.0 * output.size * kernel.size / size_out / dilation


def filled(computation: Computation, x: Instruction) -> float:
    """Returns the part of the tensor cores that the channels of a group fill."""
    *_, (size_in, size_out) = _roles(computation, x)
    groups = re.search(r"feature_group_count=(\d+)", x.text)
    if groups is None:
        return 1.0  # few channels, as of pixels, are filled up with taps
    return min(1.0, min(size_in, size_out / int(groups[1])) / _DEPTH)


def _roles(
    computation: Computation, x: Instruction
) -> tuple[Array, Array, tuple[int, int]]:
    """The output, the kernel, and its input and output channels, as in the forward.

    The labels of cuDNN's backward calls are those of the forward, too.
    """
    left, right = (computation.by_name[name].arrays[0] for name in x.operands[:2])
    output, kernel = {
        f"{_CUDNN}BackwardInput": (left, right),
        f"{_CUDNN}BackwardFilter": (right, x.arrays[0]),
    }.get(x.target, (x.arrays[0], right))
    labels = re.search(r"dim_labels=\w+_(\w+)->", x.text)
    if labels is None:
        raise ValueError(f"{x.name}: a convolution without labels of its dimensions")
    size_in, size_out = (kernel.shape[labels[1].index(label)] for label in "io")
    return output, kernel, (size_in, size_out)
