"""Two real processes: what one computes, signals, and going on when one was killed."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from failures import slowly
from jobs import Job, write_recipe
from jshard.storage.checkpoint.step_folders import find_steps
from processes import Processes
from resumable import RECIPE, read_metrics, train
from signalled_steps import step_until_signalled
from two_devices import history, history_within, refused_folder

ADAM = "optax.adamw("
CLOSE = 1e-5  # relative: roundings of float32, in another order


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Processes]:
    """Two processes with a device each."""
    with Processes(2, 1, tmp_path_factory.mktemp("pair")) as processes:
        yield processes


def test_two_processes_compute_what_one_does_and_refuse_a_folder_together(
    pair, tmp_path
):
    want = history()
    assert want[-1][0] < want[0][0]
    for found in pair.call(history):
        np.testing.assert_allclose(found, want, rtol=1e-12)
    (tmp_path / "file").touch()
    for said in pair.call(refused_folder, tmp_path / "file" / "checkpoints"):
        assert said.startswith("cannot write checkpoints to ")


@pytest.mark.slow  # by default on one, in sharding/settings/test_callers_mesh
@pytest.mark.parametrize("axes", [("fsdp",), ("data", "model")])
def test_two_processes_compute_the_same_within_explicit_axes(pair, axes):
    assert pair.call(history_within, *axes) == pair.call(history)


@pytest.mark.quick("SIGUSR1")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_one_process_stops_all_after_the_same_step(name, pair):
    ends = pair.call(step_until_signalled, name)
    step = ends[0][0]
    assert step > 10
    assert ends == [(step, "SIGTERM"), (step, name)]


def light(recipe: str) -> str:
    """Recipes of no more than is compared here: programs that compile fast."""
    assert ADAM in recipe
    return recipe.replace(ADAM, "optax.sgd(")


@pytest.mark.slow  # by default, run/test_going_on
def test_a_job_of_two_goes_on_after_one_was_killed_as_if_it_had_not_been(tmp_path):
    keys: dict[str, Any] = {"eval_every": 0, "model__noise": 0, "watch__silence": 2}
    write_recipe(tmp_path, lambda recipe: slowly(light(recipe)))
    words = ["--config.steps=24", "--config.eval_every=0", "--config.model.noise=0"]
    words += ["--config.watch.silence=2", "--workdir=run"]
    with Job(tmp_path, 2, 1, *words) as job:
        job.wait_for_step(tmp_path / "run", 6)
        os.kill(job.worker(1), signal.SIGKILL)
        since = time.monotonic()
        assert job.wait(30) == [1, 1]
        assert time.monotonic() - since < 15
        assert "process 1, at step" in job.err(1)
        assert "error: process 1 gave no sign of life for 2 s" in job.err(0)
    run = tmp_path / "run"
    before = read_metrics(run)
    saved = find_steps(run / "checkpoints")  # none where the first was not whole yet
    for step in saved[1:]:
        shutil.rmtree(run / "checkpoints" / str(step))
    # One process goes on, and computes again what the two did.
    train(tmp_path, recipe=light(RECIPE), steps=16, **keys)
    got = read_metrics(run)
    assert [line["step"] for line in got] == list(range(1, 17))
    assert min(saved, default=0) < before[-1]["step"]
    for line, other in zip(got, before, strict=False):
        assert line == pytest.approx(other, rel=CLOSE), line["step"]
