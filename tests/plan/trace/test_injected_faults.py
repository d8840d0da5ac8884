"""Traces of real steps on CPU devices, in each of which one fault is injected."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.plan import compare
from jshard.plan.output import comparison_text

STEPS, DEVICES, DELAY = 6, 2, 0.25  # seconds
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program():
    """A step of two devices, each of which calls Python between two products."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    spec = PartitionSpec("fsdp")

    def wait(seconds):
        time.sleep(float(seconds))
        return np.float32(1)

    def local(x, seconds):
        y = jnp.tanh(x[0] @ x[0])
        one = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), seconds[0])
        return jax.lax.psum(y @ (y * one), "fsdp")[None]

    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    )
    sharded = NamedSharding(mesh, spec)
    x = jax.device_put(np.full((DEVICES, 192, 192), 0.01, np.float32), sharded)

    def put(seconds):
        return jax.device_put(np.array(seconds, np.float32), sharded)

    return step.lower(x, put([0, 0])).compile(), x, put


def trace(folder: Path, program, fault: str, at: int, device: int) -> None:
    compiled, x, put = program
    usual = put([0] * DEVICES)
    delayed = put([DELAY * (i == device) for i in range(DEVICES)])
    jax.block_until_ready(compiled(x, usual))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for number in range(STEPS):
            here = number == at
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                if here and fault == "host":
                    with jax.profiler.TraceAnnotation("read the batch"):
                        time.sleep(DELAY)
                given = delayed if here and fault == "device" else usual
                jax.block_until_ready(compiled(x, given))


@pytest.mark.parametrize("draw", range(20))
def test_the_injected_fault_is_the_first_that_is_named(tmp_path, program, draw):
    rng = np.random.default_rng(draw)
    fault = ("host", "device")[draw % 2]
    at, device = int(rng.integers(1, STEPS)), int(rng.integers(DEVICES))
    trace(tmp_path, program, fault, at, device)
    found = compare(program[0], tmp_path)
    assert found.first is not None
    first, said = found.deviations[found.first], comparison_text.first(found)
    assert first.step == at, said
    if fault == "host":
        assert first.cause == "idle device with host work", said
        assert said.endswith("its host was in read the batch.")
    else:
        assert (first.cause, first.device) == ("kernel slower", device), said
        assert first.seconds == pytest.approx(DELAY, rel=0.2)
        assert "pure_callback" in said
