"""Whole runs in a bucket, of the command line, that tests do harm to."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bucket_servers import GCS, S3, Proxy, Server, running
from jobs import Job, environment
from jshard.storage.checkpoint.buckets.objects import Objects
from resumable import RECIPE, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(params=[S3, GCS])
def server(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def proxy(server):
    with Proxy(server) as proxy:
        yield proxy


def start(
    folder: Path, name: str, *words: str, proxy: Proxy | None = None
) -> subprocess.Popen:
    """Starts a run; what it prints is in the file `name`."""
    (folder / "tiny.py").write_text(RECIPE)
    with open(folder / name, "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jshard.train", "--config=tiny.py", *words],
            cwd=folder,
            env=environment()
            | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
            | (proxy.env if proxy else {}),
            stdout=log,
            stderr=log,
        )


def undisturbed(folder: Path, steps: int, *words: str) -> Path:
    """The folder of the same run, on the disk."""
    words = (f"--config.steps={steps}", "--workdir=whole", *words)
    assert start(folder, "whole.log", *words).wait(200) == 0
    return folder / "whole"


def wait_for(log: Path, pattern: str, process: subprocess.Popen, count: int) -> None:
    """Until a process has printed a line that often, or ended."""
    while len(re.findall(pattern, log.read_text(), re.MULTILINE)) < count:
        if process.poll() is not None:
            return
        time.sleep(0.002)


def copied_metrics(server: Server, run: str, folder: Path) -> list[dict]:
    """The metrics that a run has left in the bucket, without times."""
    folder.mkdir(exist_ok=True)
    content, _ = Objects(f"{server.url}/{run}").read("metrics.jsonl")
    (folder / "metrics.jsonl").write_bytes(content or b"")
    return read_metrics(folder)


def check_objects(server: Server, run: str) -> None:
    """The bucket holds the steps that are kept, and nothing else of others."""
    checkpoints = Objects(f"{server.url}/{run}/checkpoints")
    names = {path.partition("/")[0] for path in checkpoints.paths()}
    assert len(names) == 3, names  # two steps and their list


def test_thirty_kills_at_any_moment_change_nothing(server, tmp_path):
    kills, steps, chance = 30, 400, random.Random(1)
    whole = undisturbed(tmp_path, steps)
    words = (f"--config.steps={steps}", f"--workdir={server.url}/run")
    killed, saved, went_on = 0, 0, 0
    for attempt in range(3 * kills):
        process = start(tmp_path, f"{attempt}.log", *words)
        log = tmp_path / f"{attempt}.log"
        if killed < kills:
            # Steps take a moment and saves longer: most kills come in one.
            wait_for(log, r"^step ", process, 1)
            time.sleep(chance.uniform(0, 1.0))
            process.kill()
        code = process.wait(300)
        output = log.read_text()
        assert code in (0, -9), output
        for resumed in re.findall(r"^resuming .* after step (\d+)", output, re.M):
            assert int(resumed) >= saved, output
            went_on += 1
        reported = re.findall(r"^step (\d+)/\d+  checkpoint saved", output, re.M)
        saved = max([saved, *map(int, reported)])
        killed += code == -9
        if code == 0:
            break
    assert killed == kills
    assert went_on > kills / 2
    assert copied_metrics(server, "run", tmp_path / "run") == read_metrics(whole)
    check_objects(server, "run")


def check_run(server: Server, folder: Path, whole: Path) -> str:
    """The run is as if undisturbed; returns what it has printed."""
    log = (folder / "log").read_text()
    assert "Traceback" not in log
    assert copied_metrics(server, "run", folder / "run") == read_metrics(whole)
    check_objects(server, "run")
    return log


def test_a_server_that_dies_in_a_save_costs_a_line(server, proxy, tmp_path):
    whole = undisturbed(tmp_path, 40)
    words = ("--config.steps=40", f"--workdir={server.url}/run")
    process = start(tmp_path, "log", *words, proxy=proxy)
    for saves in (1, 3, 5):
        wait_for(tmp_path / "log", r"checkpoint saved", process, saves)
        proxy.stop()
        if isinstance(server, GCS):  # moto's would forget
            server.kill()
        time.sleep(5)
        assert process.poll() is None
        if isinstance(server, GCS):
            server.start()
        proxy.start()
    assert process.wait(200) == 0, (tmp_path / "log").read_text()
    check_run(server, tmp_path, whole)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_throttles_is_asked_again(status, server, proxy, tmp_path):
    whole, chance = undisturbed(tmp_path, 40), random.Random(1)
    proxy.status = lambda method, path: status * (chance.random() < 0.3)
    for steps in (20, 40):
        words = (f"--config.steps={steps}", f"--workdir={server.url}/run")
        process = start(tmp_path, "log", *words, proxy=proxy)
        assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert proxy.refused > 50
    log = check_run(server, tmp_path, whole)
    assert "resuming" in log
    assert "failed" not in log


def test_a_save_that_is_throttled_too_long_costs_two_lines(server, proxy, tmp_path):
    whole = undisturbed(tmp_path, 40)
    words = ("--config.steps=40", f"--workdir={server.url}/run")
    process = start(tmp_path, "log", *words, proxy=proxy)
    wait_for(tmp_path / "log", r"checkpoint saved", process, 1)
    proxy.status = lambda method, path: 503 * ("checkpoints" in path)
    failed = r"checkpoint of step \d+ failed, .*: the server is busy or failing"
    wait_for(tmp_path / "log", failed, process, 1)
    proxy.status = lambda method, path: 0
    assert process.wait(200) == 0, (tmp_path / "log").read_text()
    log = check_run(server, tmp_path, whole)
    assert re.search(r"the server of .* is busy or cannot be reached for 10 s", log)
    assert len(re.findall(failed, log)) == 1


def test_two_processes_train_there_and_another_mesh_goes_on(server, tmp_path):
    words = ("--config.model.noise=0.0", "--config.eval_every=0")
    whole = undisturbed(tmp_path, 24, *words)
    words = (*words, f"--workdir={server.url}/run")
    for count, devices, steps in [(2, 4, 12), (1, 2, 16), (2, 1, 24)]:
        with Job(tmp_path, count, devices, *words, f"--config.steps={steps}") as job:
            assert job.wait() == [0] * count, job.err()
            assert f"step {steps}/{steps}  checkpoint saved" in job.out()
    lines = copied_metrics(server, "run", tmp_path / "run")
    for line, want in zip(lines, read_metrics(whole), strict=True):
        assert line == pytest.approx(want, rel=1e-4), line
    check_objects(server, "run")
