"""benchmarks/gpu.py: nothing measured is lost, and all compiles for an absent GPU."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import jshard
from jshard.plan import compile_for, devices, has_plugin, hlo, tracing_for
from jshard.plan.cost.traffic import count
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import GPUS, find_constants
from jshard.sharding.settings.mesh import BATCH
from kit import check, fitting, jax_peer, jobs, kernels, peers, planned_jobs  # pyright: ignore[reportMissingImports]
from kit.machine import Machine, find_machine  # pyright: ignore[reportMissingImports]
from kit.results import DONE, FAILED, TOO_LONG, Recorder, Results  # pyright: ignore[reportMissingImports]
from kit.running import Part, run_stage  # pyright: ignore[reportMissingImports]
from kit.summary import summarize  # pyright: ignore[reportMissingImports]

CPU = Machine("CPU", 1, 0, {})
# What a part's process does, by its name.
WORKER = """
import os, sys, time
sys.path[:0] = {paths}
from pathlib import Path
from kit.results import Recorder
stage, part = sys.argv[1].split("/")
record = Recorder(Path("{out}"), stage, part)
if not record.has("first"):
    record("first", seconds=1.0)
if part == "fails":
    raise ValueError("no more memory")
if part == "hangs":
    time.sleep(600)
if part == "is killed":
    os.kill(os.getpid(), 9)
record("second", seconds=2.0)
"""


def run(out, names, *, seconds=100.0, limit=60.0, again=False):
    root = Path(__file__).parents[2]
    code = WORKER.format(paths=[str(root), str(root / "benchmarks")], out=out)
    return run_stage(
        "stage",
        [Part(name, lambda record: None, limit) for name in names],
        out,
        CPU,
        seconds=seconds,
        again=again,
        command=[sys.executable, "-c", code],
    ).values["parts"]


@pytest.mark.slow
def test_what_was_measured_before_a_failure_stays_and_later_parts_run(tmp_path):
    found = run(tmp_path, ["fails", "is killed", "works"])
    assert [part["status"] for part in found.values()] == [FAILED, FAILED, DONE]
    assert list(found["fails"]["results"]) == ["first"]
    assert list(found["is killed"]["results"]) == ["first"]
    assert list(found["works"]["results"]) == ["first", "second"]
    assert "ValueError: no more memory" in found["fails"]["error"]
    assert Results(tmp_path, "stage").values["parts"] == found


@pytest.mark.slow
def test_a_part_that_hangs_ends_at_its_limit(tmp_path):
    start = time.monotonic()
    found = run(tmp_path, ["hangs", "works"], limit=4)
    assert time.monotonic() - start < 60
    assert found["hangs"]["status"] == TOO_LONG
    assert list(found["hangs"]["results"]) == ["first"]
    assert found["works"]["status"] == DONE


@pytest.mark.slow
def test_a_stage_goes_on_with_what_is_missing(tmp_path):
    before = run(tmp_path, ["works", "fails"])
    after = run(tmp_path, ["works", "fails", "new"])
    assert after["works"] == before["works"]  # not measured again
    assert after["fails"]["attempts"] == 1
    assert after["new"]["status"] == DONE
    assert run(tmp_path, ["fails"], again=True)["fails"]["attempts"] == 2


def test_a_stage_without_time_begins_nothing(tmp_path):
    assert run(tmp_path, ["works"], seconds=1) == {
        "works": {"status": None, "attempts": 0, "results": {}}
    }


@pytest.mark.slow
def test_a_summary_tells_each_measurement_and_each_failure(tmp_path):
    run(tmp_path, ["works", "fails"])
    text = summarize(Results(tmp_path, "stage").values)
    assert "## works: done" in text
    assert "| second | seconds 2 |" in text
    assert "ValueError: no more memory" in text


def test_the_driver_tells_the_card_and_its_memory(tmp_path, monkeypatch):
    values = (
        "NVIDIA H200, 580.159.03, 143771 MiB, 1980 MHz, 345 MHz, 3201 MHz, 700.00 W"
    )
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\necho '{values}, 76.10 W, 30'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = find_machine()
    assert (machine.card, machine.count) == ("h200", 1)
    assert machine.memory == 143771 * 2**20
    assert machine.facts["temperature.gpu"] == "30"


def test_fitted_constants_are_what_the_kernels_reached_and_the_planner_reads_them(
    tmp_path,
):
    gpu = GPUS["h200"]
    launch, share = 2e-6, 0.8

    def took(amount, peak):
        return amount / (share * peak) + launch

    work = {"flops": 1e12, "bytes": 10**9}
    products = {"seconds": took(work["flops"], gpu.flops), **work}
    moved = {"seconds": took(work["bytes"], gpu.bandwidth), **work}
    found = {
        "launches": {"in a row": {"seconds": launch}},
        "products": {"bf16 a": products, "fp8 a": moved, "f32 b": {"failed": "memory"}},
        "attention": {"both a": products},
        "memory": {"copy": moved},
        "host": {"to": {"bytes_per_second": 5e10}, "from": {"bytes_per_second": 4e10}},
        "collectives": {
            f"all-gather {2**30}": {"bytes_per_second": 0.7 * gpu.link},
            "all-gather 4": {"bytes_per_second": 1.0},
        },
    }
    fitted = fitting.fit(found, "h200")
    path = tmp_path / "constants.json"
    path.write_text(kernels.as_json(fitted))
    constants = find_constants(path)
    assert constants.launch == launch
    assert constants.matmul == pytest.approx(share)
    assert constants.attention == pytest.approx(share)
    assert constants.memory == pytest.approx(share)
    assert constants.link == pytest.approx(0.7)
    assert constants.host_bus == 4e10
    assert constants.source == f"fitted to one {gpu.name}"


def test_what_nothing_measured_keeps_its_stated_constant():
    assert fitting.fit({}, "h100") == {"source": f"fitted to one {GPUS['h100'].name}"}


# Compiled for an absent H200.

CHOSEN = (
    "gpt2",
    "llama-1b-b8-dots",
    "llama-7b-b4-full",
    "llama-7b-16-layers-b4-offload",
)
ALL = [jobs.gpt2("h200"), *jobs.llamas("h200")]


@pytest.fixture
def absent():
    if not has_plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    return devices("h200:1")[0]


@pytest.mark.h100
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=() if job.name in CHOSEN else pytest.mark.slow)
        for job in ALL
    ],
    ids=lambda job: job.name,
)
def test_a_job_fits_an_h200(job, absent):
    plan = planned_jobs.plan_job(job, "h200")
    assert plan.fits
    assert plan.timeline is not None


@pytest.mark.h100
@pytest.mark.usefixtures("absent")
def test_a_plan_is_compared_with_what_was_measured(tmp_path):
    job = jobs.llamas("h200")[0]
    Recorder(tmp_path, "llama", job.name)(job.name, step_seconds=2.0, peak_bytes=10**11)
    (tmp_path / "constants.json").write_text(kernels.as_json({"matmul": 0.36}))
    record = Recorder(tmp_path, "plan", "plan")
    planned_jobs.compare(record, job=job, stage="llama", card="h200")
    (found,) = record.of("plan")["plan"].values()
    planned, off = found["planned_seconds"], found["error_per_cent"]
    assert planned["stated"] < planned["fitted"] < 2 * planned["stated"]
    assert off["fitted"] == pytest.approx(100 * (planned["fitted"] / 2.0 - 1))
    assert found["memory_error_per_cent"] == pytest.approx(
        100 * (found["planned_bytes"] / 10**11 - 1)
    )


@pytest.mark.h100
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=() if i == 1 else pytest.mark.slow)
        for i, job in enumerate(peers.jobs("h200"))
    ],
    ids=lambda job: job.name,
)
def test_peers_fit_a_third_of_an_h200(job, absent):
    share = peers.MEMORY_SHARE * GPUS["h200"].memory
    ours = planned_jobs.plan_job(job, "h200").memory.total
    theirs = compiled_bytes(jax_peer.compile_gspmd(job, "h200:1"))
    assert max(ours, theirs) < 0.9 * share


@pytest.mark.h100
@pytest.mark.parametrize("kind", kernels.KERNELS)
def test_kernels_compile_for_an_h200(kind, absent):
    sharding = jax.sharding.SingleDeviceSharding(absent)
    with tracing_for(GPUS["h200"]):
        for kernel in kernels.KERNELS[kind](False):
            shapes = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
                for x in kernel.shapes
            ]
            compiled = kernels.compile_kernel(kernel, shapes, "gpu")
            calls = kernels.ran_as(compiled.as_text() or "")
            if kernel.name.startswith("fp8"):
                assert "__cublas$lt$matmul$f8" in calls
            if kind == "attention":
                assert any(call.startswith("__cudnn$fmha") for call in calls)


@pytest.mark.h100
def test_collectives_compile_for_eight_h200s(absent):
    mesh = Mesh(devices("h200:8"), ("x",))
    for kernel in kernels.moved(mesh, [2**20]):
        compiled = kernels.compile_kernel(kernel, kernel.shapes, "gpu")
        (traffic,) = count(hlo.parse(compiled.as_text() or ""), 8, GPUS["h200"])
        assert traffic.kind == kernel.name.split()[0]
        assert traffic.bytes == kernel.bytes


@pytest.mark.h100
@pytest.mark.parametrize("offload", check.OFFLOADS)
def test_checks_of_offload_compile_for_an_h200(offload, absent):
    mesh = jshard.make_mesh(devices=[absent])
    fsdp, optimizer, make_model, step = check.make_step(
        mesh.abstract_mesh, False, **check.OFFLOADS[offload]
    )
    sharding = NamedSharding(mesh.abstract_mesh, BATCH)
    batch = {
        name: jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
        )
        for name, x in check.make_batch(False).items()
    }
    with tracing_for(GPUS["h200"]):
        traced = step.trace(fsdp.abstract_state(make_model, optimizer), batch)
    memory: Any = compile_for(mesh, traced).memory_analysis()
    assert memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
