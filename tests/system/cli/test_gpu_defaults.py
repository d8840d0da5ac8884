"""What is safe by default on GPUs, and the advice when their memory is full."""

import os

import jax
import jax.numpy as jnp
import pytest

from jshard.system.cli import command
from jshard.system.cli.machine.platform import TIMEOUT, limit_collectives
from jshard.system.compat.xla_options import OPTIONS, check_options


def test_cuda_graphs_hold_no_collectives():
    value, _ = OPTIONS["xla_gpu_enable_command_buffer"]
    assert "COLLECTIVES" not in str(value).split(",")


def test_memory_that_no_device_has_is_one_line_with_advice(monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jnp.zeros(1 << 45).block_until_ready()
    code, line = command.expected_ending(error.value) or (0, "")
    assert code == 1
    assert "Out of memory allocating" in line
    assert "docs/how_to/out_of_memory.md" in line
    assert "allocator" not in line
    assert "\n" not in line
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _, line = command.expected_ending(error.value) or (0, "")
    assert "JAX_PJRT_CLIENT_CREATE_OPTIONS=allocator:cuda_async" in line
    monkeypatch.setenv(command.ALLOCATOR, "allocator:platform")
    _, line = command.expected_ending(error.value) or (0, "")
    assert "cuda_async" not in line


@pytest.mark.parametrize(
    ("stuck", "before", "after"),
    [
        (None, "", "--TIMEOUT=600"),
        (60.0, "--xla_other=1", "--xla_other=1 --TIMEOUT=600"),
        (900.0, "", "--TIMEOUT=1800"),
        (0, "", ""),  # the user said never
        (None, "--TIMEOUT=5", "--TIMEOUT=5"),
    ],
)
def test_xla_ends_stuck_collectives_on_gpus_unless_told_never(
    stuck, before, after, monkeypatch
):
    before, after = (x.replace("TIMEOUT", TIMEOUT) for x in (before, after))
    monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    limit_collectives(stuck)
    assert os.environ["XLA_FLAGS"] == before
    monkeypatch.delenv("JAX_PLATFORMS")
    limit_collectives(stuck)
    assert os.environ["XLA_FLAGS"] == after
    check_options({TIMEOUT: 600})  # XLA ends a process for a flag that it does not know
