"""`policy.remat=fit` in a job of several processes: all choose the same."""

import json

import pytest

from jobs import Job
from tiny_runs import read_metrics

# The second process has less memory than the first; each leaves what it chose.
RECIPE = """\
import pathlib

import jax

from jshard.plan.fit import fitted as fitted_job
from jshard.recipes.gpt import *

fit, memory = fitted_job.fit, (2**40, 6 * 2**20)


def recorded(*arguments):
    found = fit(*arguments)
    pathlib.Path(f"choice-{jax.process_index()}").write_text(found.note)
    return found


fitted_job.fit = recorded
fitted_job.usable_bytes = lambda devices: memory[jax.process_index()]
"""
SIZES = {
    "steps": 2,
    "log_every": 1,
    "eval_every": 0,
    "batch_size": 16,
    "sample.length": 0,
    "model.num_layers": 2,
    "model.width": 64,
    "model.sequence_length": 256,
    "model.loss_chunk": 256,
    "checkpoint.every": 2,
}


@pytest.mark.slow
def test_processes_choose_what_the_smallest_has_memory_for(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    words = [f"--config.{key}={value}" for key, value in SIZES.items()]
    open_keys = ["--config.policy.remat=fit", "--config.policy.accumulate=fit"]
    with Job(tmp_path, 2, 2, *words, *open_keys, "--workdir=run") as job:
        assert job.wait() == [0, 0], job.err()
    one, other = (tmp_path / f"choice-{i}" for i in range(2))
    assert one.read_text() == other.read_text()
    assert " of 6.0 MiB per device; " in one.read_text()
    assert one.read_text() in job.out()
    policy = json.loads((tmp_path / "run" / "config.json").read_text())["policy"]
    assert (policy["remat"], policy["accumulate"]) != ("none", 1)

    found = [f"--config.policy.{key}={policy[key]}" for key in ("remat", "accumulate")]
    with Job(tmp_path, 2, 2, *words, *found, "--workdir=given") as job:
        assert job.wait() == [0, 0], job.err()
    losses, given = (
        [line["loss"] for line in read_metrics(tmp_path / run) if "loss" in line]
        for run in ("run", "given")
    )
    assert losses == given
