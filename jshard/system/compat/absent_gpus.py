"""Tracing, lowering and compiling for GPUs that the machine does not have.

JAX reads the cuDNN version and the GPU's compute capability from the machine it runs
on, needs devices to lower a call that XLA may have to partition, and compiles with its
default backend; programs ask it for devices while they are traced. The planner has no
GPU, so this module answers for it, while a step is traced or lowered and not longer.

Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If it breaks, ``jshard.plan`` fails for
absent GPUs; training is not affected.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from jax.sharding import Mesh

from jshard.system.errors import UserError


@contextlib.contextmanager
def cudnn_attention(
    capability: tuple[int, int], version: tuple[int, int, int]
) -> Iterator[None]:
    """Lets cuDNN attention be traced as if this GPU and cuDNN version were present."""
    major, minor, patch = version
    with _replaced(
        cudnn,
        check_cudnn_version=lambda: 10000 * major + 100 * minor + patch,
        check_compute_capability=lambda least: capability >= _numbers(least),
        is_cuda_compute_capability_equal=lambda x: capability == _numbers(x),
    ):
        yield


@contextlib.contextmanager
def asked_for(devices: list[Any]) -> Iterator[None]:
    """Lets programs that ask ``jax`` for its devices find these.

    Models choose kernels by ``jax.default_backend()``, and some constrain no sharding
    on CPUs. JAX itself asks elsewhere, so it still computes on its own devices.
    """

    def answer(theirs: Any, number: Any) -> Any:
        def found(backend: Any = None, **words: Any) -> Any:
            ours = backend in (None, "gpu", "cuda") and not words
            return number if ours else theirs(backend, **words)

        return found

    local = [x for x in devices if x.process_index == devices[0].process_index]
    with _replaced(
        jax,
        devices=answer(jax.devices, devices),
        device_count=answer(jax.device_count, len(devices)),
        local_devices=lambda *_, **__: local,
        local_device_count=answer(jax.local_device_count, len(local)),
        default_backend=lambda: "gpu",
    ):
        yield


def read_topology(path: Path) -> list[Any]:
    """Returns devices to compile for from a topology that JAX serialized.

    Raises:
      UserError: The file cannot be read, is none, or this JAX is older than 0.12.
    """
    read = getattr(topologies.TopologyDescription, "deserialize", None)
    if read is None:
        raise UserError(
            f"topology: {path} needs JAX 0.12 or later, and this is {jax.__version__}"
        )
    try:
        found = list(read(path.read_bytes()).devices)
    except OSError as error:
        raise UserError(f"topology: {path}: {error.strerror}") from error
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"topology: {path} is no topology that JAX {jax.__version__} serialized"
        ) from error
    if not found or found[0].platform != "gpu":
        raise UserError(f"topology: {path} is not of GPUs")
    return found


def cudnn_version() -> tuple[int, int]:
    """Returns cuDNN's version here, (major, minor); (0, 0) without it."""
    try:
        number = cudnn.check_cudnn_version()
    except RuntimeError:
        return 0, 0
    return number // 10000, number // 100 % 100


# The machine code never runs, and nothing before it depends on these.
_NO_CODE = {
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}


def lower(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers for GPUs a step traced on an abstract mesh, cuDNN's attention included.

    JAX refuses to lower calls that XLA may have to partition without devices. Inside
    ``shard_map`` each device makes its own call, so there is nothing to partition.
    """
    needing = {
        primitive
        for primitive in dispatch.prim_requires_devices_during_lowering
        if not primitive.name.startswith("dot_product_attention")
    }
    with _replaced(dispatch, prim_requires_devices_during_lowering=needing):
        return traced.lower(lowering_platforms=("cuda",))


def compile_lowered(
    lowered: Any, mesh: Mesh, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles with the backend of a mesh's devices instead of JAX's default backend.

    The program was lowered over the mesh's abstract mesh.
    """
    devices = tuple(mesh.devices.flat)
    lowered._lowering.compile_args["backend"] = devices[0].client
    options = _NO_CODE | (options or {})
    return lowered.compile(options, device_assignment=devices)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


@contextlib.contextmanager
def _replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a module and restores them on exit."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        vars(module).update(attributes)
        yield
    finally:
        vars(module).update(before)
