"""Compiles for H100s that are not there, with JAX's CUDA plugin.

Devices of a topology have no memory kinds, so that a sharding over them forgets that an
array is in host memory. An abstract mesh keeps it; the devices come in at the end.
"""

import os
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies

import jshard
from jshard.errors import UserError

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(number: int) -> list[Any]:
    """So many H100s of one host (``jshard.plan.topology.devices("h100:8")``).

    Raises:
      UserError: no CUDA plugin, or JAX not told to use the CPU.
    """
    found = {d.metadata["Name"] for d in metadata.distributions() if d.metadata}
    if not found.intersection(_PLUGINS):
        raise UserError("no CUDA plugin: pip install 'jshard[plan]'")
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise UserError("compiling for GPUs that are not there needs JAX_PLATFORMS=cpu")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_H100, topology=f"1x1x{number}"
    )
    return list(topology.devices)


def mesh(number: int) -> Any:
    """An abstract mesh of them, for ``jshard.FSDP`` and abstract arrays."""
    return jshard.make_mesh(devices=devices(number)).abstract_mesh


def compile(traced: jax.stages.Traced, number: int) -> jax.stages.Compiled:
    """Compiles what was traced on such a mesh."""
    targets = devices(number)
    lowered = traced.lower(lowering_platforms=("cuda",))
    # JAX would ask its default backend, the CPU's, for this.
    lowered._lowering.compile_args["backend"] = targets[0].client
    return lowered.compile(device_assignment=tuple(targets))
