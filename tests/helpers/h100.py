"""H100s to compile for, where JAX's CUDA plugin is installed; no GPU is needed."""

import pytest
from jax.sharding import Mesh

import jshard
from jshard.plan import devices, has_plugin


def h100s(number: int, *, replica: int = 1, kind: str = "h100") -> Mesh:
    """A mesh of ``number`` absent H100s, or other GPUs, or a skipped test."""
    if not has_plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    return jshard.make_mesh(devices=devices(f"{kind}:{number}"), replica=replica)
