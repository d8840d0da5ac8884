"""H100s to compile for, where JAX's CUDA plugin is installed; no GPU is needed.

Devices of a topology have no memory kinds, so that a sharding over them forgets that an
array is in host memory. An abstract mesh keeps it; the devices come in at the end.
"""

import importlib.util
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import jshard
from jshard.plan import devices


def plugin() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) for name in names)


def h100s(number: int, *, replica: int = 1) -> Mesh:
    """A mesh of ``number`` H100s that are not there, or a skipped test."""
    if not plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    return jshard.make_mesh(devices=devices(f"h100:{number}"), replica=replica)


def compile(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Compiled:
    """Compiles for ``mesh`` what was traced on its ``abstract_mesh``."""
    targets = mesh.devices.flatten().tolist()
    lowered: Any = traced.lower(lowering_platforms=("cuda",))
    # JAX would ask its default backend, the CPU's, for this.
    lowered._lowering.compile_args["backend"] = targets[0].client
    return lowered.compile(device_assignment=tuple(targets))
