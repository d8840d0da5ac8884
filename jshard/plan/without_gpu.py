"""Tracing steps for GPUs that are not there."""

import contextlib
from collections.abc import Iterator

from jshard.compat import absent_gpus
from jshard.nn.attention import ABSENT_GPU
from jshard.plan.topology import CUDNN, GPU


@contextlib.contextmanager
def tracing_for(gpu: GPU) -> Iterator[None]:
    """Within it, steps are traced as on a machine with ``gpu`` and cuDNN.

    A step over a concrete mesh of ``jshard.plan.devices``, over its ``abstract_mesh``,
    or over no mesh; one over CPU devices is still one for the CPU.
    """
    token = ABSENT_GPU.set(gpu.capability)
    try:
        with absent_gpus.cudnn_attention(gpu.capability, CUDNN):
            yield
    finally:
        ABSENT_GPU.reset(token)
