"""Jobs of several real processes: what they compute, print, log, and disagree on."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jobs import Job, tokens_seen, write_recipe
from resumable import read_metrics

STEPS = 12
EXACT = 1e-9  # relative, in float64: sums are added up in another order
WORDS = (
    f"--config.steps={STEPS}",
    "--config.eval_every=6",
    "--config.checkpoint.every=0",
    "--config.model.noise=0",
    "--config.policy.precision.param=float64",
    "--config.policy.precision.compute=float64",
    "--workdir=run",
)


def run_job(
    folder: Path, processes: int, devices: int, *words: str, hosts: int = 1
) -> Job:
    """Trains to the end; what the processes read is in the folder `seen`."""
    folder.mkdir(exist_ok=True)
    (folder / "seen").mkdir()
    write_recipe(folder)
    each_host = max(processes // hosts, 1)
    env = {"JAX_ENABLE_X64": "1", "SEEN": str(folder / "seen")}

    def on_host(index: int) -> list[str]:
        return ["env", f"JSHARD_HOST=host{index // each_host}"]

    with Job(
        folder, processes, devices, *WORDS, *words, env=env, prefix=on_host
    ) as job:
        assert job.wait() == [0] * processes, job.err()
        assert job.leftovers() == []
    return job


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Makes the run of one process with so many devices, once."""
    made: dict[int, Path] = {}

    def make(devices: int) -> Path:
        if devices not in made:
            made[devices] = tmp_path_factory.mktemp("alone") / "job"
            run_job(made[devices], 1, devices)
        return made[devices]

    return make


def check_same(folder: Path, single: Path) -> None:
    """The same batches in the same order, and the same losses within rounding."""
    seen = tokens_seen(single / "seen")
    assert len(seen) >= STEPS
    assert tokens_seen(folder / "seen") == seen
    got, want = read_metrics(folder / "run"), read_metrics(single / "run")
    assert [line["step"] for line in got] == [line["step"] for line in want]
    assert sum("eval_loss" in line for line in got) == 2
    for line, other in zip(got, want, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == pytest.approx(other[name], rel=EXACT), (line["step"], name)


@pytest.mark.slow
def test_two_processes_of_two_hosts_follow_one_process_and_tell_of_the_network(
    alone, tmp_path
):
    job = run_job(tmp_path / "job", 2, 2, "--config.mesh.replica=hosts", hosts=2)
    check_same(job.folder, alone(4))

    out = job.out()
    mesh = "4 x cpu: replica 2 x fsdp 2; 2 hosts: replica across, fsdp within them"
    assert mesh in out
    gathers, sums = (
        re.findall(rf"^{kind} .*$", out, re.MULTILINE)
        for kind in ("all-gathers", "all-reduces")
    )
    # Only sums leave a host: those of gradients' shards, and counts.
    assert len(gathers) == 1, out
    assert gathers[0].endswith(", none over the network")
    assert [line.split(", ")[-2] for line in sums] == ["float64", "int32"], out
    for line in sums:
        assert re.search(r"(, over|\d [KM]?i?B over) the network$", line)
    assert "Gloo" not in out
    assert job.out(1) == ""
    assert job.err() == ""
    for index in range(2):
        log = (job.folder / "run" / "logs" / f"process-{index}.log").read_text()
        assert f"process {index} of 2 (options)" in log
        for place in ("step 1: compiling", "step 6: evaluating", "finishing"):
            assert place in log, log
    config = json.loads((job.folder / "run" / "config.json").read_text())
    assert config["mesh"]["replica"] == "hosts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "words", "hosts"),
    [
        (4, 2, [], 1),
        (4, 2, ["--config.mesh.replica=hosts"], 2),
        (4, 2, ["--config.mesh.replica=8"], 1),
    ],
)
def test_processes_follow_one_process_with_all_devices(
    processes, devices, words, hosts, alone, tmp_path
):
    job = run_job(tmp_path / "job", processes, devices, *words, hosts=hosts)
    check_same(job.folder, alone(processes * devices))


@pytest.mark.slow
def test_batches_are_the_same_on_hosts_whose_processes_are_numbered_in_turns(
    alone, tmp_path
):
    """Processes 0 and 2 share a host, as do 1 and 3: the mesh puts them together."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "seen").mkdir()
    write_recipe(folder)
    env = {"JAX_ENABLE_X64": "1", "SEEN": str(folder / "seen")}
    with Job(
        folder,
        4,
        1,
        *WORDS,
        "--config.mesh.replica=hosts",
        env=env,
        prefix=lambda index: ["env", f"JSHARD_HOST=host{index % 2}"],
    ) as job:
        assert job.wait() == [0] * 4, job.err()
    # Each reads the rows that its place in the mesh has: 0, 2, 1, 3.
    steps = sorted(
        {file.name.partition("-")[0] for file in (folder / "seen").iterdir()}
    )
    seen = [
        np.concatenate(
            [np.load(folder / "seen" / f"{step}-{index}.npy") for index in (0, 2, 1, 3)]
        ).tolist()
        for step in steps
    ]
    assert seen == tokens_seen(alone(4) / "seen")
    for line, other in zip(
        read_metrics(folder / "run"), read_metrics(alone(4) / "run"), strict=True
    ):
        assert line == pytest.approx(other, rel=EXACT)
