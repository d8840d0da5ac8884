"""Runs with `deterministic=true`: the same bits after a kill and in other processes."""

import shutil
import time
from pathlib import Path

import pytest

from jobs import Job, write_recipe
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.restore import CHECKPOINTS
from jshard.storage.checkpoint.step_folders import find_steps
from resumable import read_metrics, train

STEPS = 48
KEYS = {"deterministic": True, "eval_every": 4}


def bits(run: Path, step: int) -> dict[str, str]:
    """The hashes of all arrays of a checkpoint."""
    arrays = metadata.read(run / CHECKPOINTS / str(step))["arrays"]
    return {name: entry[metadata.BITS] for name, entry in arrays.items()}


def test_a_deterministic_run_that_was_killed_goes_on_with_the_same_bits(tmp_path):
    whole = train(tmp_path, "whole", steps=6, **KEYS)
    killed = shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(killed / CHECKPOINTS / "6")
    train(tmp_path, "killed", steps=6, **KEYS)
    assert read_metrics(killed) == read_metrics(whole)
    assert bits(killed, 6) == bits(whole, 6)
    assert len({*bits(whole, 6).values()}) > 10
    assert (
        "deterministic   the same bits each time" in (whole / "notes.json").read_text()
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_in_other_processes_with_the_same_bits(tmp_path):
    """Eight devices of two processes, and of four after SIGKILL to all."""
    write_recipe(tmp_path)
    words = ["--config.deterministic=true", f"--config.steps={STEPS}"]
    with Job(tmp_path, 2, 4, "--workdir=whole", *words) as job:
        assert job.wait(300) == [0, 0]
    with Job(tmp_path, 2, 4, "--workdir=killed", *words) as job:
        job.wait_for_step(tmp_path / "killed", 6)
        deadline = time.monotonic() + 60
        while not find_steps(tmp_path / "killed" / CHECKPOINTS):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert find_steps(tmp_path / "killed" / CHECKPOINTS)[-1] < STEPS
    with Job(tmp_path, 4, 2, "--workdir=killed", *words) as job:
        assert job.wait(300) == [0] * 4
    assert bits(tmp_path / "killed", STEPS) == bits(tmp_path / "whole", STEPS)
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
