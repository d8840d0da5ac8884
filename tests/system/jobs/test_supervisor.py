"""The exit code of a worker's parent, and what it says of an end nobody explained."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from jshard.system.jobs.cluster import Cluster
from jshard.system.jobs.supervisor import JOB_FAILED, PASSED_ON, _Supervisor


@pytest.fixture
def supervise() -> Iterator[Callable[..., _Supervisor]]:
    """Makes supervisors of shell scripts; takes back their signal handlers."""
    numbers = (*PASSED_ON, JOB_FAILED)
    before = {number: signal.getsignal(number) for number in numbers}
    made: list[_Supervisor] = []

    def make(script: str, index: int = 0) -> _Supervisor:
        cluster = Cluster(index, 2, "127.0.0.1:1", None, "options")
        made.append(_Supervisor(cluster, ["sh", "-c", script]))
        return made[-1]

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)
    for supervisor in made:
        assert supervisor._worker.stderr is not None
        supervisor._worker.stderr.close()
        os.close(supervisor._alive)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_worker_that_a_passed_signal_ends_gives_the_code_of_a_shell(
    number, supervise, capfd
):
    parent = supervise("exec sleep 100")
    timer = threading.Timer(0.1, parent._pass_on, [number])
    timer.start()
    assert parent.run() == 128 + number
    assert capfd.readouterr().err == f"jshard: {number.name}: ended\n"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("exit 0", 0, ""),
        ("echo reported >&2; exit 3", 3, "reported\n"),
        (
            "kill -SEGV $$",
            1,
            "jshard: error: process 0, at its start, was ended by SIGSEGV\n",
        ),
        (
            "kill -KILL $$",
            1,
            "jshard: error: process 0, at its start, was ended by SIGKILL, as by a "
            "kernel that is out of memory\n",
        ),
    ],
)
def test_an_end_is_told_once_and_a_code_of_its_own_is_kept(
    script, code, said, supervise, capfd
):
    assert supervise(script).run() == code
    assert capfd.readouterr().err == said


def test_of_other_processes_the_last_lines_are_told_where_they_fail(supervise, capfd):
    assert (
        supervise("for i in $(seq 40); do echo line $i >&2; done; exit 3", 1).run() == 3
    )
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"process 1: line {i}" for i in range(11, 41)]
    assert supervise("echo line >&2", 1).run() == 0
    assert capfd.readouterr().err == ""
