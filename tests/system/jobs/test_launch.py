"""`python -m jshard.launch`: starts a job's processes, and starts them again."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from failures import STEPS, slowly
from jobs import (
    children,
    environment,
    marked,
    write_recipe,
)
from launched import WORDS, launch
from resumable import read_metrics


@pytest.mark.quick("words2", "words5")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes=2"], "no recipe to train"),
        (["--num_processes=2", "--", "--workdir=x"], "no recipe to train"),
        (
            ["--", "--config=tiny.py"],
            "how many processes? give --num_processes or --hosts",
        ),
        (
            ["--hosts=a,b", "--num_processes=3", "--", "--config=x"],
            "divisible by the number of --hosts, 2",
        ),
        (
            ["--hosts=a", "--", "--config=x", "--process_id=1"],
            "launch sets this itself",
        ),
        (
            ["--num_process=2", "--", "--config=x"],
            "did you mean --num_processes?",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(words, message, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jshard.launch", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.slow
def test_a_job_is_started_again_after_a_kill_and_computes_the_same(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=2") as job:
        job.wait_for_step(20)
        os.kill(job.worker(1), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
        assert marked(job.mark) == []
    assert "the job failed: restart 1 of 2" in job.err.read_text()
    assert "restart 2" not in job.err.read_text()
    assert "resuming run after step" in job.out.read_text()
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_restarts_end_and_the_command_goes_on_later(tmp_path):
    def fail(recipe: str) -> str:
        late = "        if i == 100:\n            raise KeyError('bad example')\n"
        return slowly(recipe).replace("        time.sleep(0.02)\n", late)

    write_recipe(tmp_path, fail)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=1") as job:
        assert job.wait() == 1
    err = job.err.read_text()
    assert err.count("error: make_data.<locals>.example() failed") == 2, err
    assert err.endswith("jshard: error: the job failed 2 times: no more restarts\n")


@pytest.mark.slow
def test_bad_input_is_not_started_again(tmp_path):
    write_recipe(tmp_path)
    words = [*WORDS, "--config.batch_size=7"]
    with launch(tmp_path, "--num_processes=2", "--max_restarts=3", words=words) as job:
        assert job.wait() == 2
    assert len(job.err.read_text().splitlines()) == 1
    assert "batch_size=7" in job.err.read_text()


@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_and_stops_all(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    options = ["--num_processes=2", "--max_restarts=3"]
    with launch(tmp_path, *options) as job:
        job.wait_for_step(20)
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 75, job.err.read_text()
        assert marked(job.mark) == []
    assert "saved; run the same command" in job.err.read_text()
    with launch(tmp_path, *options) as job:
        assert job.wait() == 0
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_a_second_signal_kills_and_a_killed_launcher_leaves_nothing(tmp_path):
    write_recipe(tmp_path, slowly)
    for twice in (True, False):
        with launch(tmp_path, "--num_processes=2") as job:
            job.wait_for_step(20)
            if twice:
                job.process.terminate()
                time.sleep(0.1)
                job.process.terminate()
                assert job.wait(10) == 1
            else:
                job.process.kill()
            deadline = time.monotonic() + 15
            while marked(job.mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert marked(job.mark) == []
            if not twice:
                err = job.err.read_text()
                assert "the launcher is gone: process 0 saves and ends" in err
                assert "saved; run the same command" in err
        (tmp_path / "run" / "metrics.jsonl").unlink()


@pytest.mark.slow
def test_a_job_whose_shell_is_killed_is_saved_and_started_again(whole, tmp_path):
    write_recipe(tmp_path, slowly)
    with launch(tmp_path, "--num_processes=2", "--max_restarts=1") as job:
        job.wait_for_step(20)
        os.kill(int(children(job.process.pid)[0]), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
    err = job.err.read_text()
    assert "error: the shell of process 0 was ended by SIGKILL" in err
    assert "the job failed: restart 1 of 1" in err
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.fixture
def rsh(tmp_path) -> str:
    """Reaches hosts of this machine, until `dead/HOST` is there."""
    script = tmp_path / "rsh"
    script.write_text(
        f"""#!/bin/sh
        host=$1; shift
        if [ -e {tmp_path}/dead/$host ]; then exit 255; fi
        export JSHARD_HOST=$host
        exec sh -c "$*"
        """
    )
    script.chmod(0o755)
    (tmp_path / "dead").mkdir()
    return shlex.join([str(script)])


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_are_left(rsh, tmp_path, monkeypatch):
    """Host names are addresses of this machine: all of 127.0.0.0/8 is."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    write_recipe(tmp_path, slowly)
    hosts = [f"127.0.0.{number}" for number in range(1, 5)]
    options = [f"--hosts={','.join(hosts)}", f"--rsh={rsh}", "--max_restarts=1"]
    words = [*WORDS[:2], "--config.mesh.cpu_devices=1", *WORDS[3:]]
    with launch(tmp_path, *options, "--min_hosts=2", words=words) as job:
        job.wait_for_step(20)
        for number in (2, 4):
            (tmp_path / "dead" / f"127.0.0.{number}").touch()
        for index in (1, 3):
            os.kill(job.worker(index), signal.SIGKILL)
        assert job.wait() == 0, job.err.read_text()
    assert "no answer from 127.0.0.2, 127.0.0.4" in job.err.read_text()
    mesh = re.findall(r"^mesh .*", job.out.read_text(), re.MULTILINE)
    assert "4 x cpu: replica 1 x fsdp 4; 4 hosts" in mesh[0]
    assert "2 x cpu: replica 1 x fsdp 2; 2 hosts" in mesh[1]
    assert list((tmp_path / "run/compiled").glob("jit_train_step-*"))
    assert job.out.read_text().count("caches programs for process 0 only") == 2
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_job_waits_for_no_host_it_cannot_do_without(rsh, tmp_path):
    write_recipe(tmp_path, slowly)
    options = ["--hosts=127.0.0.1,127.0.0.2", f"--rsh={rsh}", "--max_restarts=1"]
    with launch(tmp_path, *options) as job:
        job.wait_for_step(20)
        (tmp_path / "dead" / "127.0.0.2").touch()
        os.kill(job.worker(1), signal.SIGKILL)
        assert job.wait() == 1
    assert "1 of 2 hosts answer, and --min_hosts=2" in job.err.read_text()
