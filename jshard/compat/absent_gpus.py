"""Tracing, lowering and compiling for GPUs that are not there.

JAX asks the machine it traces on for cuDNN's version and the GPU's compute capability,
wants devices where it lowers a call that XLA may have to partition, and compiles with
its default backend. The planner has none of these. All of it was tried on JAX 0.10.2,
0.11.2 and 0.12.0.1; when it breaks, ``jshard.plan`` fails for GPUs that are not
attached, and training goes on as before.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as cudnn


@contextlib.contextmanager
def cudnn_attention(
    capability: tuple[int, int], version: tuple[int, int, int]
) -> Iterator[None]:
    """Within it, cuDNN's attention is traced as on a machine that has both.

    Args:
      capability: the GPU's compute capability.
      version: cuDNN's.
    """
    major, minor, patch = version
    with _replaced(
        cudnn,
        check_cudnn_version=lambda: 10000 * major + 100 * minor + patch,
        check_compute_capability=lambda least: capability >= _numbers(least),
        is_cuda_compute_capability_equal=lambda x: capability == _numbers(x),
    ):
        yield


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


def compile_lowered(
    lowered: Any, devices: Sequence[Any], options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles with the backend of ``devices``, not with JAX's default one.

    Args:
      lowered: a ``jax.stages.Lowered``, over an abstract mesh.
      devices: all that it is for, of a topology for instance.
      options: of XLA.
    """
    lowered._lowering.compile_args["backend"] = devices[0].client
    return lowered.compile(options, device_assignment=tuple(devices))


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
