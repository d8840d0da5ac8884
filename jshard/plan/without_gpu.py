"""Tracing and lowering cuDNN's attention for GPUs that are not there.

JAX asks the machine it traces on for cuDNN's version and the GPU's compute capability,
and wants devices where it lowers a call that XLA may have to partition. These are JAX's
private functions; all that depends on its version is here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jshard.nn.attention import ABSENT_GPU
from jshard.plan.topology import CUDNN, GPU


@contextlib.contextmanager
def tracing_for(gpu: GPU) -> Iterator[None]:
    """Within it, steps are traced as on a machine with ``gpu`` and cuDNN.

    A step over a concrete mesh of ``jshard.plan.devices``, over its ``abstract_mesh``,
    or over no mesh; one over CPU devices is still one for the CPU.
    """

    def version() -> int:
        major, minor, patch = CUDNN
        return 10000 * major + 100 * minor + patch

    token = ABSENT_GPU.set(gpu.capability)
    try:
        with _replaced(
            cudnn,
            check_cudnn_version=version,
            check_compute_capability=lambda least: gpu.capability >= _numbers(least),
            is_cuda_compute_capability_equal=lambda x: gpu.capability == _numbers(x),
        ):
            yield
    finally:
        ABSENT_GPU.reset(token)


@contextlib.contextmanager
def lowering_without_devices() -> Iterator[None]:
    """Within it, a step with cuDNN's attention is lowered over an abstract mesh.

    JAX refuses that for calls that XLA may have to partition. In ``shard_map`` each
    device makes its own, and there is nothing to partition.
    """
    needing = {
        primitive
        for primitive in dispatch.prim_requires_devices_during_lowering
        if not primitive.name.startswith("dot_product_attention")
    }
    with _replaced(dispatch, prim_requires_devices_during_lowering=needing):
        yield


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


@contextlib.contextmanager
def _replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """The module with other attributes, all of which it must have."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
