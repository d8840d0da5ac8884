"""A state that does not fit the memory is refused before it is allocated."""

import math
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard
from jshard.sharding.layout import capacity
from jshard.sharding.layout.capacity import check_capacity, host_bytes
from jshard.sharding.layout.memory_kinds import HOST
from tiny_runs import RECIPE, expect_one_line

HUGE = 2**24  # features: a layer of 2**50 bytes in float32


def huge(rngs: nnx.Rngs) -> nnx.Module:
    layer = nnx.Linear(HUGE, HUGE, use_bias=False, rngs=rngs)
    return nnx.Sequential(jshard.Unit(layer))


def test_a_state_larger_than_the_host_is_one_line():
    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(jshard.UserError) as refused:
        fsdp.init(huge, optax.adam(1e-3))
    said = str(refused.value)
    assert "needs 3072.0 TiB of the host's memory, 384.0 TiB for each of 8 devi" in said
    assert "smaller model" in said
    assert "\n" not in said


def test_a_run_is_refused_before_its_start_up_note(train_here, tmp_path):
    recipe = RECIPE.replace("nnx.Linear(8, 64", f"nnx.Linear(8, {HUGE}")
    last = f"jshard.Unit(nnx.Linear({HUGE}, {HUGE}, rngs=rngs))"
    recipe = recipe.replace("nnx.Linear(64, 1, rngs=rngs)", last)
    run = train_here(tmp_path, "--config=tiny.py", "--workdir=run", recipe=recipe)
    expect_one_line(run, 2, "of the host's memory")
    assert run.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.fixture
def state():
    """Eight MiB on each device, and four in host memory."""
    mesh = jshard.make_mesh()
    of_device = NamedSharding(mesh, PartitionSpec("fsdp"))
    of_host = of_device.with_memory_kind(HOST)
    array = lambda n, where: jax.ShapeDtypeStruct((8, n), jnp.float32, sharding=where)
    return [array(2**21, of_device), array(2**20, of_host)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_fits_exactly_is_allowed_and_a_byte_less_is_not(
    platform, state, monkeypatch
):
    on_cpu = platform == "cpu"
    for less in (0, 1):
        host = 2 * (12 if on_cpu else 4) * 2**20 - less * on_cpu
        limit = {"bytes_limit": 8 * 2**20 - less}
        device = types.SimpleNamespace(
            platform=platform, memory_stats=lambda limit=limit: limit
        )
        monkeypatch.setattr(capacity, "host_bytes", lambda host=host: host)
        if not less:
            check_capacity(state, [device] * 2)
            continue
        said = "24.0 MiB of the host's" if on_cpu else "8.0 MiB on each device"
        with pytest.raises(jshard.UserError, match=said):
            check_capacity(state, [device] * 2)


def test_what_is_pinned_counts_as_the_hosts(state, monkeypatch):
    device = types.SimpleNamespace(platform="gpu", memory_stats=dict)
    check_capacity(state, [])
    check_capacity(state, [device] * 2)  # which does not say what it has
    monkeypatch.setattr(capacity, "host_bytes", lambda: 8 * 2**20 - 1)
    with pytest.raises(jshard.UserError, match=r"needs 8\.0 MiB of the host's memory"):
        check_capacity(state, [device] * 2)


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "max", math.inf),
        ("memory.max", "1048576\n", 2**20),
        ("memory/memory.limit_in_bytes", "2097152", 2**21),
        ("memory/memory.limit_in_bytes", "9223372036854771712", math.inf),
    ],
)
def test_a_container_has_what_its_group_may_use(file, text, limit, tmp_path):
    machine = host_bytes(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    Path(tmp_path / file).write_text(text)
    assert host_bytes(tmp_path) == min(machine, limit)
