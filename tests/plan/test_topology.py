"""Absent GPUs can be named, and compiled for."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jshard
from decoder import Sizes, loss_fn, make_decoder
from jshard.plan import GPUS, devices, has_plugin
from jshard.plan.fit.hardware import peak_flops, short_name
from jshard.plan.topology import parse
from jshard.sharding.settings.mesh import BATCH


@pytest.mark.parametrize("spec", ["h100:1", "h100:8", "H100:64", "a100:16", "b200:256"])
def test_a_spec_is_a_gpu_and_a_number_that_fills_hosts(spec):
    gpu, number = parse(spec)
    name, digits = spec.lower().split(":")
    assert (gpu.name, number) == (GPUS[name].name, int(digits))


@pytest.mark.parametrize(
    ("spec", "host", "domain"),
    [
        ("h100:64", 8, 8),
        ("l40s:3", 3, 3),
        ("gb200:2", 2, 2),
        ("gb200:72", 4, 72),
        ("gb300:144", 4, 72),
        ("gb200:256", 4, 64),  # four racks of 64 rather than three of 72 and one of 40
        ("gb200:76", 4, 4),  # 19 hosts have no equal parts but themselves
    ],
)
def test_a_number_of_gpus_fills_equal_domains_of_fast_links(spec, host, domain):
    gpu, _ = parse(spec)
    assert (gpu.host, gpu.domain) == (host, domain)


def test_each_gpu_is_known_by_its_own_name():
    names = {name: short_name(gpu.name).lower() for name, gpu in GPUS.items()}
    assert {**names, "rtx4090": "rtx4090", "a6000": "a6000"} == {n: n for n in GPUS}
    assert (names["rtx4090"], names["a6000"]) == ("rtx 4090", "rtx a6000")
    for gpu in GPUS.values():
        assert peak_flops(gpu.name) == gpu.flops


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("v100:8", "unknown GPU 'v100'; possible: a100, h100, h200, b200, b300"),
        ("h100", "'h100' is not GPU:NUMBER, like h100:64"),
        ("h100:eight", "is not GPU:NUMBER"),
        ("h100:-8", "is not GPU:NUMBER"),
        ("h100:0", "must be 1 to 8, or a multiple of 8"),
        ("h100:12", "must be 1 to 8, or a multiple of 8"),
        ("gb200:6", "must be 1 to 4, or a multiple of 4"),
    ],
)
def test_other_specs_are_refused_with_what_is_possible(spec, says):
    with pytest.raises(jshard.UserError, match=says):
        devices(spec)


def test_without_the_cuda_plugin_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        "jshard.system.cli.machine.platform._PLUGINS", ("no_such_module",)
    )
    with pytest.raises(jshard.UserError, match=r"pip install 'jshard\[plan\]'"):
        devices("h100:8")


def test_jax_must_be_told_to_use_the_cpu(monkeypatch):
    monkeypatch.setattr("jshard.system.cli.machine.platform._PLUGINS", ("jax",))
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(jshard.UserError, match="set JAX_PLATFORMS=cpu"):
        devices("h100:8")


@pytest.mark.h100
@pytest.mark.skipif(not has_plugin(), reason="pip install 'jshard[plan]'")
def test_eight_gpus_make_a_host():
    hosts = [device.process_index for device in devices("h100:24")]
    assert hosts == [host for host in range(3) for _ in range(8)]
    assert len(devices("b200:3")) == 3
    assert [device.process_index for device in devices("gb200:8")] == [0] * 4 + [1] * 4


@pytest.mark.h100
@pytest.mark.parametrize("spec", ["h100:8", "gb300:8", "rtx4090:2"])
def test_a_step_compiles_for_gpus_that_are_not_there(spec):
    if not has_plugin():
        pytest.skip("pip install 'jshard[plan]'")
    mesh = jshard.make_mesh(devices=devices(spec))
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    optimizer = optax.adamw(1e-3)
    sizes = Sizes(layers=2)
    state = fsdp.abstract_state(make_decoder(sizes), optimizer)
    sharding = jax.NamedSharding(fsdp.mesh, BATCH)
    tokens = jax.ShapeDtypeStruct((8, sizes.length), jnp.int32, sharding=sharding)
    step = fsdp.train_step(loss_fn, optimizer)
    compiled = step.lower(state, {"tokens": tokens, "targets": tokens}).compile()
    assert "all-gather" in (compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes > 0
