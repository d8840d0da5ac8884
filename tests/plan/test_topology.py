"""Absent GPUs can be named, and compiled for."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

import jshard
from decoder import Sizes, loss_fn, make_decoder
from jshard.plan import GPUS, devices, has_plugin, topology
from jshard.plan.cost.kernel_work import MATRIX
from jshard.plan.fit.hardware import peak_flops, short_name
from jshard.plan.planning import Plan
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
    others = {
        "rtx4090": "rtx 4090", "rtx5090": "rtx 5090", "rtx6000ada": "rtx 6000 ada",
        "rtxpro6000": "rtx pro 6000", "a6000": "rtx a6000", "a100-40": "a100",
        "h100-pcie": "h100 pcie", "h100-96": "h100",
    }  # fmt: skip
    assert names == {n: n for n in GPUS} | others
    for gpu in GPUS.values():
        assert peak_flops(gpu.name) == gpu.flops


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("v100:8", "unknown GPU 'v100'; possible: a100, a100-40, h100, h100-96"),
        ("rtx6000:8", "unknown GPU 'rtx6000'; did you mean rtxpro6000?"),
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


new = pytest.mark.skipif(
    not (hasattr(topologies.TopologyDescription, "deserialize") and has_plugin()),
    reason="JAX 0.12 with its CUDA plugin reads topologies",
)
old = pytest.mark.skipif(
    hasattr(topologies.TopologyDescription, "deserialize") or not has_plugin(),
    reason="JAX before 0.12 with its CUDA plugin",
)


@new
def test_a_topology_that_jax_wrote_is_the_clusters_own(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = tmp_path / "mine.topology"
    there: Any = topologies.TopologyDescription(devices("h100:16"))
    path.write_bytes(there.serialize())
    assert parse(str(path)) == parse("h100:16")
    assert [x.process_index for x in devices(str(path))] == 8 * [0] + 8 * [1]


def fake_topology(
    monkeypatch, processes: list[int], kind: str = "NVIDIA H100 80GB HBM3"
):
    there = [SimpleNamespace(device_kind=kind, process_index=x) for x in processes]
    monkeypatch.setattr(topology, "_read", lambda path: there)
    return parse("mine.topology")


def test_a_serialized_topology_has_the_hosts_of_its_processes(monkeypatch):
    gpu, number = fake_topology(monkeypatch, [0, 0, 0, 0, 1, 1, 1, 1])
    assert (gpu.host, gpu.domain, number) == (4, 4, 8)
    gpu, _ = fake_topology(monkeypatch, [x // 4 for x in range(72)], "NVIDIA GB200")
    assert (gpu.host, gpu.domain) == (4, 72)
    assert fake_topology(monkeypatch, [0])[1] == 1


@pytest.mark.parametrize("processes", [[0, 1, 2, 3], [0, 0, 1, 1, 1]], ids=str)
def test_processes_that_tell_no_hosts_are_refused(monkeypatch, processes):
    with pytest.raises(jshard.UserError, match="in a job of one process per host"):
        fake_topology(monkeypatch, processes)


def test_a_serialized_topology_of_unknown_gpus_is_refused(monkeypatch):
    with pytest.raises(
        jshard.UserError, match=r"is of NVIDIA T4, whose figures are un"
    ):
        fake_topology(monkeypatch, [0], "NVIDIA T4")


@new
@pytest.mark.parametrize("content", [None, b"", b"no topology", bytes(range(200))])
def test_what_is_no_topology_is_refused(content, tmp_path):
    path = tmp_path / "mine.topology"
    if content is not None:
        path.write_bytes(content)
    what = "No such file" if content is None else "is no topology that JAX"
    with pytest.raises(jshard.UserError, match=f"^topology: {path}:? {what}"):
        parse(str(path))


@old
def test_an_older_jax_says_that_it_reads_no_topology(tmp_path):
    with pytest.raises(jshard.UserError, match=r"mine\.topology needs JAX 0\.12 or"):
        parse(str(tmp_path / "mine.topology"))


@pytest.fixture
def cluster(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return str(path)

    return write


def test_a_clusters_file_says_how_it_differs_from_a_known_gpu(cluster):
    path = cluster('gpu = "H100"\nmemory = 99_000_000_000\nnetwork = 50\n')
    gpu, number = parse(f"{path}:16")
    assert number == 16
    changed = {"memory": 99_000_000_000, "port": 0.125, "source": "cluster.toml"}
    assert gpu == dataclasses.replace(GPUS["h100"], **changed)
    assert gpu.network_port == pytest.approx(GPUS["h100"].network_port / 8)


def test_a_cluster_has_hosts_and_domains_of_its_own(cluster):
    path = cluster('gpu = "a100"\ngpus_per_host = 4\n')
    assert [(gpu.host, gpu.domain) for gpu, _ in [parse(f"{path}:8")]] == [(4, 4)]
    with pytest.raises(jshard.UserError, match="must be 1 to 4, or a multiple of 4"):
        parse(f"{path}:6")
    path = cluster('gpu = "gb200"\ngpus_per_host = 4\n')  # as it is: a rack stays one
    assert [(gpu.host, gpu.domain) for gpu, _ in [parse(f"{path}:72")]] == [(4, 72)]
    path = cluster('gpu = "gb200"\ngpus_per_domain = 36\n')
    assert [(gpu.host, gpu.domain) for gpu, _ in [parse(f"{path}:72")]] == [(4, 36)]


def test_figures_of_ones_own_are_confirmed_by_no_run(cluster):
    own, _ = parse(cluster('gpu = "h100"') + ":8")
    product = SimpleNamespace(kind=MATRIX, flops=1e15)
    timeline: Any = SimpleNamespace(events=[product], seconds=1.0)
    nothing: Any = None

    def plan(gpu):
        return Plan(
            name="", about="", topology="", gpu=gpu, devices=8, device_kind="",
            text="", module=nothing, memory=nothing, traffic=nothing, timeline=timeline,
        )  # fmt: skip

    assert plan(GPUS["h100"]).seconds_range is not None
    assert plan(own).kind == "bf16 on H100, as cluster.toml has it"
    assert plan(own).seconds_range is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu = ", "is not TOML"),
        ("network = 50", "gpu = None must name the GPU that these are most like: a100"),
        ('gpu = "v100"', "gpu = 'v100' must name the GPU"),
        ('gpu = "h100"\nnetwrok = 50', "unknown key 'netwrok'; did you mean network?"),
        ('gpu = "h100"\nnetwork = 0', "network = 0 must be Gb/s in one direction"),
        ('gpu = "h100"\nnetwork = "50"', "network = '50' must be Gb/s"),
        ('gpu = "h100"\nnetwork = inf', "network = inf must be Gb/s"),
        ('gpu = "h100"\nmemory = 80.5', "memory = 80.5 must be bytes per GPU"),
        ('gpu = "h100"\nflops = true', "flops = True must be FLOP/s"),
        ('gpu = "h100"\ngpus_per_domain = 12', "must be a multiple of the 8 GPUs"),
    ],
)
def test_what_is_no_clusters_file_is_refused(cluster, text, says):
    with pytest.raises(jshard.UserError, match=re.escape(says)):
        parse(f"{cluster(text)}:8")
    with pytest.raises(jshard.UserError, match=r"no\.toml: No such file or directory"):
        parse("no.toml:8")


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
