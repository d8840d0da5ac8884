"""GPUs to compile for, present or not: ``devices("h100:64")``."""

import collections
import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jshard.nn.attention import ABSENT_GPU
from jshard.plan.fit.cluster_file import SUFFIX, read_cluster
from jshard.plan.fit.hardware import GPU, GPUS
from jshard.system.cli.machine.platform import has_cuda_plugin as has_plugin
from jshard.system.compat import absent_gpus
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

CUDNN = (9, 11, 0)  # JAX asks for 9.8, and for 9.11 to attend on B300 and GB300
CUDA = (12, 9, 0)
TOPOLOGY = ".topology"  # how the name of a serialized topology ends


def parse(spec: str) -> tuple[GPU, int]:
    """Parses ``"h100:64"``, or ``"cluster.toml:64"``, into the GPU and 64.

    A file ``"cluster.topology"`` says both: what
    ``jax.experimental.topologies.get_attached_topology().serialize()`` returns on the
    cluster, by JAX 0.12 or later.

    The GPU's ``domain`` is that of so many: they fill as few NVLink domains as hold
    equal numbers of hosts. 256 GB200s are four times 64 of a rack's 72.

    Raises:
      UserError: the spec has another form, the GPU is unknown, the number does not
        fill hosts, or the file is not that of a cluster.
    """
    if spec.endswith(TOPOLOGY):
        return _described(spec)
    match = re.fullmatch(r"(.+):(\d{1,6})", spec)
    if match is None:
        raise UserError(f"topology: {spec!r} is not GPU:NUMBER, like h100:64")
    name, number = match[1].lower(), int(match[2])
    if not name.endswith(SUFFIX) and name not in GPUS:
        hint = did_you_mean(name, GPUS, cutoff=0.8)
        raise UserError(
            f"topology: unknown GPU {match[1]!r}{hint}; possible: "
            f"{', '.join(GPUS)}, or a {SUFFIX} file of your own"
        )
    gpu = GPUS[name] if name in GPUS else read_cluster(Path(match[1]))
    return _in_domains(gpu, number, spec), number


def _in_domains(gpu: GPU, number: int, spec: str) -> GPU:
    """Returns the GPU with the hosts and domains of so many."""
    if number < 1 or (number > gpu.host and number % gpu.host):
        raise UserError(
            f"topology: {spec!r}: the number of GPUs must be 1 to {gpu.host}, or a "
            f"multiple of {gpu.host} (complete hosts)"
        )
    host = min(gpu.host, number)
    fewest, hosts = -(-number // gpu.domain), number // host
    domains = next(n for n in range(fewest, hosts + 1) if hosts % n == 0)
    return dataclasses.replace(gpu, host=host, domain=number // domains)


def _described(spec: str) -> tuple[GPU, int]:
    """Returns what a topology is of that JAX serialized, one process per host."""
    there = _read(spec)
    kind, number = there[0].device_kind, len(there)
    known = [gpu for gpu in GPUS.values() if gpu.name == kind]
    if not known:
        raise UserError(
            f"topology: {spec} is of {kind}, whose figures are unknown: describe the "
            f"cluster by a {SUFFIX} file, which names the GPU that it is most like"
        )
    processes = collections.Counter(device.process_index for device in there)
    host, *others = {*processes.values()}
    if others or (host == 1 < number):
        raise UserError(
            f"topology: {spec} is of processes with {sorted({*processes.values()})} "
            "GPUs, which tells no hosts: serialize it in a job of one process per host"
        )
    gpu = known[0].on_hosts(host)
    return _in_domains(gpu, number, spec), number


def devices(spec: str) -> list[Any]:
    """Returns devices to compile for: ``jshard.make_mesh(devices=devices("h100:64"))``.

    They hold no arrays: a step over them can be lowered and compiled, and the compiled
    program's memory and text read, but not run. The spec is a GPU of ``GPUS`` and how
    many; eight make a host, and four of GB200 and GB300.

    Raises:
      UserError: a spec that ``parse`` refuses, no CUDA plugin, or JAX is not restricted
        to the CPU.
    """
    gpu, number = parse(spec)
    require_plugin()
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise UserError(
            "topology: compiling for absent GPUs runs on the CPU: set "
            "JAX_PLATFORMS=cpu in the environment"
        )
    if spec.endswith(TOPOLOGY):
        return _read(spec)
    return _absent(gpu, f"1x{number // gpu.host}x{gpu.host}")


def _absent(gpu: GPU, shape: str) -> list[Any]:
    config = _target_config(gpu)
    found = topologies.get_topology_desc(
        "", "cuda", target_config=config, topology=shape
    )
    return list(found.devices)


def _read(path: str) -> list[Any]:
    """Returns the devices of a serialized topology."""
    require_plugin()
    _absent(GPUS["h100"], "1x1x1")  # JAX loads the plugin for it, and not to read one
    return absent_gpus.read_topology(Path(path))


def require_plugin() -> None:
    """Raises UserError if JAX's CUDA plugin is not installed."""
    if not has_plugin():
        raise UserError(
            "topology: compiling for absent GPUs needs JAX's CUDA plugin, but no GPU: "
            "pip install 'jshard[plan]'"
        )


@contextlib.contextmanager
def tracing_for(gpu: GPU) -> Iterator[None]:
    """Traces steps in its context as on a machine with ``gpu`` and cuDNN.

    This holds for steps over a mesh of ``devices``, over its ``abstract_mesh``, or
    without a mesh. A step over CPU devices stays one for the CPU.
    """
    token = ABSENT_GPU.set(gpu.capability)
    try:
        with absent_gpus.cudnn_attention(gpu.capability, CUDNN):
            yield
    finally:
        ABSENT_GPU.reset(token)


def compile_for(
    mesh: Mesh, traced: jax.stages.Traced, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a step traced on the ``abstract_mesh`` of absent ``devices``.

    Absent devices have no memory kinds, so a sharding over them cannot say that an
    array is in host memory. A sharding over an abstract mesh can.
    """
    return absent_gpus.compile_lowered(absent_gpus.lower(traced), mesh, options)


def _target_config(gpu: GPU) -> str:
    """XLA's ``GpuTargetConfigProto`` as text; JAX 0.12 reads ``dnn_version`` alone."""
    block, core, opt_in = gpu.shared
    major, minor = gpu.capability
    cudnn, cuda = (
        "major: {} minor: {} patch: {}".format(*numbers) for numbers in (CUDNN, CUDA)
    )
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: {gpu.threads}
          shared_memory_per_block: {block}
          shared_memory_per_core: {core}
          shared_memory_per_block_optin: {opt_in}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.fpus}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {gpu.bandwidth:.0f}
          l2_cache_size: {gpu.l2}
          clock_rate_ghz: {gpu.clock}
          device_memory_size: {gpu.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          dnn_version: "{".".join(map(str, CUDNN))}"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ {cudnn} }}
        runtime_version {{ {cuda} }}
        device_description_str: "{gpu.name}"
    """
