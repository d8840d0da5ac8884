"""jshard.Trainer in a program that joined its job itself: who fails is named."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import environment, free_port

PROGRAM = Path(__file__).with_name("user_program.py")
pytestmark = pytest.mark.slow


def run(folder: Path, how: str, victim: int, count: int = 3) -> list[tuple[int, str]]:
    """The exit codes and outputs of a job whose `victim` fails in step 5."""
    address = f"127.0.0.1:{free_port()}"
    logs = [folder / f"out-{rank}" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        words = [str(rank), str(count), address, how, str(victim)]
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), *words],
                    cwd=folder,
                    env=environment(),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + 90
    try:
        for rank, process in enumerate(processes):
            if how != "SIGSTOP" or rank != victim:
                process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    return [(p.returncode, t) for p, t in zip(processes, texts, strict=True)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGKILL", "jshard: error: process 1 gave no sign of life for 3 s (killed,"),
        ("SIGSTOP", "jshard: error: process 1 gave no sign of life for 3 s (killed,"),
        ("hang", "jshard: error: the others wait for process 1: no process made"),
        ("raise", "ValueError: no such pixel"),
    ],
)
def test_a_process_that_fails_ends_the_job_and_is_named(how, said, tmp_path):
    ended = run(tmp_path, how, victim=1)
    codes = [code for code, _ in ended]
    dead = how.startswith("SIG")
    assert codes == [1, -signal.SIGKILL if dead else 1, 1]
    assert said in ended[0][1]
    assert "process 1" in next(x for x in ended[0][1].splitlines() if "error: " in x)


def test_without_process_0_jax_ends_the_others_at_once(tmp_path):
    ended = run(tmp_path, "SIGKILL", victim=0)
    for code, text in ended[1:]:
        assert code == -signal.SIGABRT
        assert "the leader task was preempted/died/restarted" in text


def test_a_job_trains_twice_and_an_error_of_all_is_raised_in_each(tmp_path):
    for code, text in run(tmp_path, "nothing", victim=-1):
        assert code == 0, text
        assert "\ndone\n" in text
        assert "told: the loss is nan at step 21" in text
