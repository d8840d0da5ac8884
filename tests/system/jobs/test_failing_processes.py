"""Processes that die, stop or fail: all end soon, say who it was, and can go on."""

import os
import random
import re
import signal
import time

import pytest

from failures import (
    SOON,
    STEPS,
    WORDS,
    check_end,
    check_names,
    go_on,
    slowly,
    train_until,
)
from jobs import Job, write_recipe
from jshard.storage.checkpoint.restore import CHECKPOINTS
from jshard.storage.checkpoint.step_folders import find_steps
from resumable import read_metrics


@pytest.mark.slow
def test_a_killed_process_ends_the_job_with_the_stacks_of_the_others(tmp_path):
    with train_until(tmp_path, 10) as job:
        os.kill(job.worker(1), signal.SIGKILL)
        check_end(job, time.monotonic())
        check_names(job, 1)
        assert "process 1, at step" in job.err(1)
        assert "was ended by SIGKILL" in job.err(1)
        log = (tmp_path / "run" / "logs" / "process-0.log").read_text()
        assert "Python stacks:" in log
        assert "loop.py" in log.partition("Python stacks:")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)]
)
def test_a_process_hit_at_a_random_moment_ends_the_job_which_goes_on_bit_for_bit(
    number, victim, whole, tmp_path
):
    chance = random.Random(f"{number} {victim}")
    with train_until(tmp_path, chance.randrange(8, 50)) as job:
        time.sleep(chance.random() / 5)
        os.kill(job.worker(victim), number)
        check_end(job, time.monotonic())
        check_names(job, victim)
    go_on(tmp_path)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_a_process_killed_with_its_parent_is_named_by_the_others(tmp_path):
    with train_until(tmp_path, 10) as job:
        worker = job.worker(1)
        job.processes[1].kill()
        os.kill(worker, signal.SIGKILL)
        since = time.monotonic()
        assert job.processes[0].wait(SOON) == 1
        assert time.monotonic() - since < SOON
        check_names(job, 1)
        assert job.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_whose_parent_is_killed_does_not_stay_behind(victim, tmp_path):
    with train_until(tmp_path, 10) as job:
        job.processes[victim].kill()
        since = time.monotonic()
        job.wait(SOON)
        assert time.monotonic() - since < SOON
        assert job.processes[1 - victim].returncode == 1
        assert f"process {victim}" in job.err(1 - victim)
        assert job.leftovers() == []


@pytest.mark.slow
def test_a_job_of_four_that_loses_one_goes_on_with_two_within_rounding(whole, tmp_path):
    with train_until(tmp_path, 20, 4, 1) as job:
        os.kill(job.worker(3), signal.SIGKILL)
        check_end(job, time.monotonic())
        check_names(job, 3)
    go_on(tmp_path, 2, 1)
    got, want = read_metrics(tmp_path / "run"), read_metrics(whole)
    assert [line["step"] for line in got] == list(range(1, STEPS + 1))
    for line, other in zip(got, want, strict=True):
        assert line == pytest.approx(other, rel=1e-5), line["step"]


@pytest.mark.slow
def test_sigterm_to_another_process_saves_the_same_step_in_all(whole, tmp_path):
    with train_until(tmp_path, 10) as job:
        job.processes[1].terminate()
        check_end(job, time.monotonic(), code=75)
    match = re.search(r"SIGTERM at step (\d+): saved", job.err(0))
    assert match, job.err()
    assert job.err(1) == ""
    assert find_steps(tmp_path / "run" / CHECKPOINTS)[-1] == int(match[1])
    go_on(tmp_path)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_sigterm_ends_a_job_that_saves_nothing(tmp_path):
    write_recipe(tmp_path, slowly)
    with Job(tmp_path, 2, 2, *WORDS, "--config.checkpoint.every=0") as job:
        job.wait_for_step(tmp_path / "run", 5)
        job.processes[1].terminate()
        check_end(job, time.monotonic(), code=130)
    assert re.fullmatch(
        r"jshard: error: SIGTERM at step \d+, and checkpoint.every=0 saves nothing\n",
        job.err(),
    )


# Process 1 stops entering collectives at its sixth step, and lives: jax-ml/jax#38503.
STALLING = """
import time

shard = jshard.FSDP.shard_batch
calls = iter(range(10**9))

def stalling(fsdp, batch):
    if next(calls) == 6 and jax.process_index() == 1:
        time.sleep(1000)
    return shard(fsdp, batch)

jshard.FSDP.shard_batch = stalling
"""
IMPATIENT = """
from jshard.system.jobs import stuck
stuck.LEAST = 5.0
"""


@pytest.mark.slow
def test_a_process_that_is_alive_but_stuck_is_named_and_ends_the_job(tmp_path):
    """In a minute; the job waited for ever in jax-ml/jax#38503."""
    write_recipe(tmp_path, lambda recipe: recipe + STALLING)
    with Job(tmp_path, 2, 2, *WORDS) as job:
        job.wait_for_step(tmp_path / "run", 4)
        since = time.monotonic()
        assert job.wait(90) == [1, 1], job.err()
        took = time.monotonic() - since
        assert job.leftovers() == []
    assert took < 62, took
    line = next(line for line in job.err(0).splitlines() if "watch.stuck" in line)
    assert "error: the others wait for process 1: no process made progress for" in line
    # Process 0 waits for step 7, or for room behind it.
    ahead = r"process 0 at step [78] \((computing|step)\)"
    assert re.search(rf"{ahead}, process 1 at step 7 \(step\)", line)
    log = (tmp_path / "run" / "logs" / "process-1.log").read_text()
    assert "in stalling" in log.partition("Python stacks:")[2]


@pytest.mark.slow
def test_a_compilation_longer_than_the_limit_of_a_step_is_waited_for(tmp_path):
    def late(recipe: str) -> str:
        wait = "\n    time.sleep(3)  # while it is traced\n"
        loss = "def loss_fn(model, batch):"
        changed = recipe.replace(f"{loss}\n", f"{loss}{wait}")
        return f"import time\n{changed}{IMPATIENT}stuck.LEAST = 2.0\n"

    write_recipe(tmp_path, late)
    words = ["--config.steps=20", "--config.eval_every=0", "--workdir=run"]
    with Job(tmp_path, 2, 2, *words) as job:
        assert job.wait() == [0, 0], job.err()


@pytest.mark.slow
def test_a_job_in_which_nobody_gets_on_ends_with_all_stacks(tmp_path):
    def hang(recipe: str) -> str:
        late = "        if i == 100 and jax.process_index() == 1:\n            nap()\n"
        nap = "def nap():\n    time.sleep(1000)\n\n\n"
        changed = slowly(recipe).replace("def make_data", nap + "def make_data")
        # Training's numbers, of which each comes once in 64 steps.
        return changed.replace("        time.sleep(0.02)\n", late)

    write_recipe(tmp_path, hang)
    with Job(tmp_path, 2, 2, *WORDS, "--config.watch.stuck=15") as job:
        job.wait_for_step(tmp_path / "run", 1)
        assert job.wait(60) == [1, 1]
        assert job.leftovers() == []
    assert "no process made progress for 15 s (watch.stuck)" in job.err(0)
    assert "the others wait for process 1" in job.err(0)
    assert re.search(r"process 1 at step \d+ \(data\)", job.err(0)), job.err(0)
    logs = tmp_path / "run" / "logs"
    stacks = [
        (logs / f"process-{index}.log").read_text().partition("Python stacks:")[2]
        for index in range(2)
    ]
    assert all("loop.py" in text for text in stacks), stacks
    assert "in nap" in stacks[1]
    assert "in nap" not in stacks[0]


@pytest.mark.slow
def test_a_bug_in_one_process_ends_all_with_its_traceback_and_index(tmp_path):
    def fail(recipe: str) -> str:
        late = "        if i == 100 and jax.process_index() == 1:\n"
        late += "            raise KeyError('bad example')\n"
        return slowly(recipe).replace("        time.sleep(0.02)\n", late)

    write_recipe(tmp_path, fail)
    with Job(tmp_path, 2, 2, *WORDS) as job:
        job.wait_for_step(tmp_path / "run", 1)
        check_end(job, time.monotonic())
    message = r"jshard: process 1: error: .* failed at \S+\.py:\d+: KeyError: 'bad"
    assert re.search(message, job.err(0))
    assert "Your code's part of the traceback" in job.err(0)
    assert job.err(1) == ""
