"""What the processes of a job do not agree on is told in one line, by process 0."""

import shutil
import subprocess
import time

import pytest

from failures import WORDS
from jobs import Job, write_recipe
from jshard.system.files.lock import lock_folder


@pytest.mark.slow
def test_a_mistake_that_only_one_process_can_see_ends_all_with_one_line(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    with lock_folder(tmp_path / "run"), Job(tmp_path, 2, 2, *WORDS) as job:
        assert job.wait(60) == [2, 2]
    assert len(job.err().splitlines()) == 1, job.err()
    assert "is training in --workdir=run" in job.err(0)


@pytest.mark.slow
def test_a_coordinator_port_that_is_taken_is_told_in_one_line(tmp_path):
    write_recipe(tmp_path)
    with Job(tmp_path, 2, 2, *WORDS) as job:
        job.wait_for_step(tmp_path / "run", 1)
        address = job.processes[0].args[3]
        again = subprocess.run(
            [*job.processes[0].args[:-1], "--workdir=other", address],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert again.returncode == 2
    assert "cannot listen there: Address already in use" in again.stderr
    assert len(again.stderr.splitlines()) == 1


@pytest.mark.slow
def test_folders_that_are_not_shared_are_told_before_anything_is_lost(tmp_path):
    """The same --workdir=run, on two machines: here, from two folders."""
    folders = [tmp_path, tmp_path / "elsewhere"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        write_recipe(folder)
    prefix = [["env", f"--chdir={folder}"] for folder in folders]
    with Job(tmp_path, 2, 2, *WORDS, prefix=lambda index: prefix[index]) as job:
        assert job.wait(60) == [2, 2], job.err()
    assert len(job.err().splitlines()) == 1, job.err()
    assert "process 1 does not see what process 0 writes in --workdir" in job.err(0)
    assert [file.name for file in (tmp_path / "run" / "logs").iterdir()] == [
        "process-0.log"
    ]


@pytest.fixture
def apart(tmp_path):
    """A run with a checkpoint, and a folder where process 1 does not see it."""
    folders = [tmp_path, tmp_path / "elsewhere"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        write_recipe(folder, lambda recipe: recipe + IMPATIENT)
    with Job(tmp_path, 2, 2, *WORDS, "--config.steps=4") as job:
        assert job.wait() == [0, 0], job.err()
    return lambda index: ["env", f"--chdir={folders[index]}"]


IMPATIENT = """
import os
from jshard.storage.checkpoint import restore
restore.PATIENCE = float(os.environ.get("PATIENCE", restore.PATIENCE))
"""
# Orbax does not save where folders have several names.
GO_ON = (*WORDS, "--config.steps=8", "--config.checkpoint.every=0")


@pytest.mark.slow
def test_a_process_that_sees_the_newest_checkpoint_late_resumes_from_it(
    apart, tmp_path
):
    """It saw no checkpoint, and went on without the others: the job hung."""
    late = tmp_path / "elsewhere" / "run"
    with Job(tmp_path, 2, 2, *GO_ON, prefix=apart) as job:
        while not (late / "logs" / "process-1.log").exists():
            assert job.processes[1].poll() is None, job.err()
            time.sleep(0.1)
        time.sleep(5)
        shutil.rmtree(late)
        late.symlink_to(tmp_path / "run")
        assert job.wait() == [0, 0], job.err()
    assert "resuming run after step 4" in job.out()
    assert job.err() == ""


@pytest.mark.slow
def test_a_process_that_does_not_see_the_newest_checkpoint_is_named(apart, tmp_path):
    with Job(tmp_path, 2, 2, *GO_ON, prefix=apart, env={"PATIENCE": "3"}) as job:
        assert job.wait() == [2, 2], job.err()
    assert len(job.err().splitlines()) == 1, job.err()
    assert "process 1 does not see checkpoint run/checkpoints/4, which" in job.err(0)


# What one of two processes does differently, by the kind that is compared.
ODD = """
import os

if os.environ.get("ODD") == "package":
    from importlib import metadata
    version = metadata.version
    metadata.version = lambda name: "0.1" if name == "optax" else version(name)
if os.environ.get("ODD") == "parameter":
    small = make_model
    def make_model(config, rngs):
        return Model(2 * config.model.width, config.model.noise, rngs=rngs)
if os.environ.get("ODD") == "data":
    right = make_data
    def make_data(config, split):
        return right(config, split)[1:]
if os.environ.get("ODD") == "checkpoint":
    import dataclasses
    import jshard.training.prepared_run as prepared_run
    find = prepared_run.find_start
    def find_start(*args, **kwargs):
        return dataclasses.replace(find(*args, **kwargs), step=4)
    prepared_run.find_start = find_start
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("config", "optimizer.peak: 0.5, not 0.01"),
        ("package", "optax: 0.1, not"),
        ("code", "tiny.py: "),
        ("parameter", ".params['embed']['embedding'].value: float32[64, 32], not"),
        ("data", "train, first example: "),
        ("checkpoint", "at step: 4, not 0"),
        ("--workdir", "other, not run"),
    ],
)
def test_what_one_process_does_differently_is_named_before_the_first_step(
    kind, name, tmp_path
):
    write_recipe(tmp_path, lambda recipe: recipe + ODD)
    own = {
        "config": ["--config.optimizer.peak=0.5"],
        "code": ["--config=other/tiny.py"],
        "--workdir": ["--workdir=other"],
    }
    if kind == "code":
        (tmp_path / "other").mkdir()
        write_recipe(tmp_path / "other", lambda recipe: recipe + ODD + "# new\n")
    with Job(
        tmp_path,
        2,
        2,
        *WORDS,
        each={1: own.get(kind, [])},
        prefix=lambda index: ["env", f"ODD={kind if index else ''}"],
    ) as job:
        assert job.wait(60) == [2, 2], job.err()
    assert len(job.err().splitlines()) == 1, job.err()
    assert f"process 1 differs from process 0: {kind} " in job.err(0)
    assert name in job.err(0)
    assert "step 1/" not in job.out()


@pytest.mark.slow  # by default, test_agreement
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("RATE=0.5", "its train step is another program, from line "),
        ("JAX_THREEFRY_PARTITIONABLE=0", "jax_threefry_partitionable: False, not True"),
        ("JAX_ENABLE_X64=1", "jax_enable_x64: True, not False"),
        ("JAX_DEFAULT_MATMUL_PRECISION=highest", "jax_default_matmul_precision: "),
        ("XLA_FLAGS=--xla_cpu_enable_fast_math=true", "environment XLA_FLAGS: "),
        ("JAX_NUM_CPU_DEVICES=3", "devices number: 3, not 2"),
    ],
)
def test_a_process_that_would_compute_something_else_is_named_before_the_first_step(
    setting, said, tmp_path
):
    rate = "float(os.environ.get('RATE', '1e-3'))"
    write_recipe(
        tmp_path, lambda text: text.replace("learning_rate(config))", f"{rate})")
    )
    prefix = [[], ["env", setting]]
    with Job(tmp_path, 2, 2, *WORDS, prefix=lambda index: prefix[index]) as job:
        assert job.wait(90) == [2, 2], job.err()
    assert len(job.err().splitlines()) == 1, job.err()
    assert "process 1 differs from process 0: " in job.err(0)
    assert said in job.err(0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
