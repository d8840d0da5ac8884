"""Processes that die, stop, fail or are cut off: all end soon, and say who it was."""

import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import Job, write_recipe
from jshard.restore import CHECKPOINTS, find_steps
from resumable import read_metrics

STEPS = 80
SOON = 15.0  # seconds, in which all of a job's processes must have ended
WORDS = (
    f"--config.steps={STEPS}",
    "--config.eval_every=0",
    "--config.model.noise=0",  # its draws depend on the mesh
    "--workdir=run",
)
# A process gets on no faster than a test can hit it.
SLOWLY = "    def example(i):\n", "    def example(i):\n        time.sleep(0.02)\n"


def slowly(recipe: str) -> str:
    return "import time\n" + recipe.replace(*SLOWLY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run, of two processes with two devices each."""
    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder)
    with Job(folder, 2, 2, *WORDS) as job:
        assert job.wait() == [0, 0], job.err()
    return folder / "run"


def check_end(job: Job, since: float, code: int = 1) -> float:
    """All end soon with this code, and nothing is left; returns the seconds."""
    codes = job.wait(SOON + 15)
    took = time.monotonic() - since
    assert took < SOON, f"{took}\n{job.err()}"
    assert set(codes) == {code}, f"{codes}\n{job.err()}"
    deadline = time.monotonic() + 2  # a worker whose parent was killed
    while job.leftovers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.leftovers() == []
    return took


def check_names(job: Job, victim: int) -> None:
    """The terminal names the process, and the step that each had reached."""
    text = job.err()
    lines = [line for line in text.splitlines() if "the last places: " in line]
    assert any(re.search(rf"error: process {victim}\b", line) for line in lines), text
    assert all("at step" in line.partition("places")[2] for line in lines), text
    assert "Traceback" not in text, text
    assert not re.search(r"^[EF]\d{4} ", text, re.MULTILINE), text  # C++'s


def go_on(folder: Path, processes: int = 2, devices: int = 2) -> None:
    """The same command, to the end."""
    with Job(folder, processes, devices, *WORDS) as job:
        assert job.wait() == [0] * processes, job.err()
    assert "resuming run after step" in job.out()


def train_until(folder: Path, step: int, count: int = 2, devices: int = 2) -> Job:
    write_recipe(folder, slowly)
    job = Job(folder, count, devices, *WORDS)
    job.wait_for_step(folder / "run", step)
    return job


def test_a_killed_process_ends_the_job_which_goes_on_bit_for_bit(whole, tmp_path):
    with train_until(tmp_path, 10) as job:
        os.kill(job.worker(1), signal.SIGKILL)
        check_end(job, time.monotonic())
        check_names(job, 1)
        assert "process 1, at step" in job.err(1)
        assert "was ended by SIGKILL" in job.err(1)
        log = (tmp_path / "run" / "logs" / "process-0.log").read_text()
        assert "Python stacks:" in log
        assert "loop.py" in log.partition("Python stacks:")[2]
    go_on(tmp_path)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_hit_at_a_random_moment_ends_the_job_which_goes_on_bit_for_bit(
    number, victim, seed, whole, tmp_path
):
    chance = random.Random(f"{number} {victim} {seed}")
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
def test_a_job_of_four_that_loses_one_goes_on_with_two_within_rounding(tmp_path):
    folder, reference = tmp_path / "job", tmp_path / "whole"
    folder.mkdir()
    reference.mkdir()
    with train_until(folder, 20, 4, 1) as job:
        os.kill(job.worker(3), signal.SIGKILL)
        check_end(job, time.monotonic())
        check_names(job, 3)
    go_on(folder, 2, 1)
    write_recipe(reference)
    with Job(reference, 4, 1, *WORDS) as job:
        assert job.wait() == [0] * 4, job.err()
    got, want = read_metrics(folder / "run"), read_metrics(reference / "run")
    assert [line["step"] for line in got] == list(range(1, STEPS + 1))
    for line, other in zip(got, want, strict=True):
        assert line == pytest.approx(other, rel=1e-5), line["step"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_to_any_process_saves_the_same_step_in_all(victim, whole, tmp_path):
    with train_until(tmp_path, 10) as job:
        job.processes[victim].terminate()
        check_end(job, time.monotonic(), code=75)
    match = re.search(r"SIGTERM at step (\d+): saved", job.err(0))
    assert match, job.err()
    assert job.err(1) == ""
    assert find_steps(tmp_path / "run" / CHECKPOINTS)[-1] == int(match[1])
    go_on(tmp_path)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_a_job_in_which_nobody_gets_on_ends_with_all_stacks(tmp_path):
    def hang(recipe: str) -> str:
        late = "        if i == 100 and jax.process_index() == 1:\n            nap()\n"
        nap = "def nap():\n    time.sleep(1000)\n\n\n"
        changed = slowly(recipe).replace("def make_data", nap + "def make_data")
        # Training's numbers, of which each comes once in 64 steps.
        return changed.replace("        time.sleep(0.02)\n", late)

    write_recipe(tmp_path, hang)
    with Job(tmp_path, 2, 2, *WORDS, "--config.watch.stuck=6") as job:
        job.wait_for_step(tmp_path / "run", 1)
        assert job.wait(60) == [1, 1]
        assert job.leftovers() == []
    assert "no process got on for 6 s (watch.stuck)" in job.err(0)
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
    assert job.err(0).count("Traceback") >= 1
    assert "jshard: process 1: error: KeyError" in job.err(0)
    assert "bad example" in job.err(0)
    assert job.err(1) == ""


@pytest.mark.slow
def test_a_mistake_that_only_one_process_can_see_ends_all_with_one_line(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with Job(tmp_path, 2, 2, *WORDS) as job:
        assert job.wait(60) == [2, 2]
    assert len(job.err().splitlines()) == 1, job.err()
    assert "already holds a run" in job.err(0)


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
    import jshard.training.loop as loop
    find = loop.find_start
    loop.find_start = lambda *args: dataclasses.replace(find(*args), step=4)
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


class Network:
    """Two network namespaces on this machine, joined by a cable that can be cut."""

    def __init__(self) -> None:
        self.names = [f"jshard-{uuid.uuid4().hex[:6]}" for _ in range(2)]
        self._hosts = [Path("/etc/netns") / name for name in self.names]
        for name in self.names:
            self._ip("netns", "add", name)
        a, b = self.names
        self._ip("-n", a, "link", "add", "to", "type", "veth", "peer", "to", "netns", b)
        host = os.uname().nodename
        for index, name in enumerate(self.names):
            address = self.address(index)
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "to")
            for link in ("lo", "to"):
                self._ip("-n", name, "link", "set", link, "up")
            # Gloo listens where the machine's name points to.
            self._hosts[index].mkdir(parents=True)
            text = f"127.0.0.1 localhost\n{address} {host}\n"
            (self._hosts[index] / "hosts").write_text(text)

    def address(self, index: int) -> str:
        return f"10.213.7.{index + 1}"

    def run_in(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[index]]

    def cut(self) -> None:
        self._ip("-n", self.names[1], "link", "set", "to", "down")

    def remove(self) -> None:
        for name, folder in zip(self.names, self._hosts, strict=True):
            self._ip("netns", "delete", name)
            shutil.rmtree(folder)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield made
    made.remove()


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 31])
def test_a_cut_connection_ends_both_sides_and_each_names_the_other(
    step, network, whole, tmp_path
):
    write_recipe(tmp_path, slowly)
    with Job(
        tmp_path,
        2,
        2,
        *WORDS,
        prefix=network.run_in,
        coordinator=network.address(0),
        env={"JSHARD_HOST": ""},
    ) as job:
        job.wait_for_step(tmp_path / "run", step)
        network.cut()
        check_end(job, time.monotonic())
        assert "error: process 1 gave no sign of life for 8 s" in job.err(0)
        assert "process 0, which coordinates, gave no sign of life" in job.err(1)
        check_names(job, 1)
    go_on(tmp_path)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)
