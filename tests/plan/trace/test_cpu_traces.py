"""Traces of a program on two CPU devices, whose steps are compared with each other."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.plan import compare
from jshard.plan.output import comparison_text
from jshard.plan.trace import xspace
from jshard.plan.trace.profile_reader import read_profile
from jshard.system.errors import UserError


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory):
    """A compiled program of two devices, and a folder with a trace of five steps.

    The host stalls before the fourth.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    sharded = NamedSharding(mesh, PartitionSpec("fsdp"))

    def local(x):
        return jax.lax.psum(jnp.sin(x) @ jnp.ones((64, 64)), "fsdp") + x

    spec = PartitionSpec("fsdp")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jax.device_put(np.ones((128, 64), np.float32), sharded)
    compiled = step.lower(x).compile()
    x = jax.block_until_ready(compiled(x))
    folder = tmp_path_factory.mktemp("profile")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(
        folder, create_perfetto_trace=True, profiler_options=options
    ):
        for number in range(5):
            with jax.profiler.StepTraceAnnotation("step", step_num=10 + number):
                if number == 3:
                    with jax.profiler.TraceAnnotation("read the batch"):
                        time.sleep(0.3)
                x = jax.block_until_ready(compiled(x))
    return compiled, folder


def test_on_cpus_steps_are_compared_with_each_other(on_cpus):
    compiled, folder = on_cpus
    found = compare(compiled, folder)
    assert found.planned is None
    assert found.steps.numbers == (10, 11, 12, 13, 14)
    assert found.first is not None
    first = found.deviations[found.first]
    assert (first.cause, first.step) == ("idle device with host work", 3)
    assert first.seconds == pytest.approx(0.3, abs=0.2)
    text = "\n".join(comparison_text.lines(found))
    assert "In step 13 the program started" in text
    assert "its host was in read the batch." in text
    assert "planned         no times for these devices: expected is the median" in text
    data = comparison_text.as_json(found)
    assert data["deviations"][data["first"] or 0]["step"] == 13


def test_a_trace_with_an_instruction_that_the_program_lacks_is_refused(on_cpus):
    compiled, folder = on_cpus
    text = compiled.as_text()
    others = re.sub(r"%(?=\w*sin)", "%other_", text)  # one of five
    assert others != text

    class Other(type(compiled)):
        def __init__(self):
            pass

        def as_text(self):
            return others

    with pytest.raises(UserError, match="this is a trace of another jit_local"):
        compare(Other(), folder)


def test_a_file_read_in_pieces_says_the_same(on_cpus, monkeypatch):
    compiled, folder = on_cpus
    whole = read_profile(folder)
    monkeypatch.setattr(xspace, "_PIECE", 100)  # bytes: an event or two
    pieces = read_profile(folder)
    assert pieces == whole
    assert compare(compiled, pieces).first == compare(compiled, whole).first


def test_a_file_that_is_cut_off_says_so(on_cpus, tmp_path):
    compiled, folder = on_cpus
    (file,) = folder.rglob("*.xplane.pb")
    data = file.read_bytes()
    short = tmp_path / "short.xplane.pb"
    for length in (len(data) // 2, len(data) - 1):
        short.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"is cut off .*: trace again, and let the"):
            compare(compiled, short)


def test_perfetto_s_form_says_the_same(on_cpus):
    compiled, folder = on_cpus
    (file,) = folder.rglob("perfetto_trace.json.gz")
    one, other = compare(compiled, folder), compare(compiled, file)
    assert other.seconds == pytest.approx(one.seconds, abs=1e-8)
    assert comparison_text.first(other) == comparison_text.first(one)
