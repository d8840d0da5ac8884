"""A search's processes."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jshard.plan.search.processes import run_each

WORKER = """\
import json, os, subprocess, sys, time
task = json.loads(sys.argv[1])
if "die" in task:
    print("Fatal: told to", file=sys.stderr, flush=True)
    os.abort()
if "sleep" in task:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    open(task["sleep"], "a").write(f"{os.getpid()} {child.pid} ")
    time.sleep(99)
print(json.dumps(task))
"""


def results(tasks, timeout=60.0):
    worker = [sys.executable, "-S", "-c", WORKER]
    commands = [[*worker, json.dumps(task)] for task in tasks]
    return dict(run_each(commands, dict(os.environ), at_a_time=2, timeout=timeout))


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_process_that_dies_costs_its_candidate_only():
    found = results([{"n": 0}, {"die": 1}, {"n": 2}, {"die": 1}, {"n": 4}])
    assert sorted(n for n, reply in found.items() if "error" in reply) == [1, 3]
    assert found[1]["error"].endswith("died by SIGABRT: Fatal: told to")
    assert [found[n]["n"] for n in (0, 2, 4)] == [0, 2, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_candidate_that_takes_too_long_is_given_up_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    found = results([{"sleep": str(pids)}, {"n": 1}], timeout=1.0)
    assert found[0]["error"] == "took longer than 1 s"
    assert found[1]["n"] == 1
    wait_for(lambda: not any(map(is_running, pids.read_text().split())))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_no_process_behind(tmp_path):
    pids = tmp_path / "pids"
    pids.touch()

    def interrupt():
        wait_for(lambda: len(pids.read_text().split()) == 4)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # A shell's background jobs, which these tests may be, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            results([{"sleep": str(pids)}] * 9)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    wait_for(lambda: not any(map(is_running, pids.read_text().split())))
