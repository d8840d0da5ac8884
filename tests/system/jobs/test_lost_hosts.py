"""Jobs of four hosts that lose one: they go on from the copies on the others."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from failures import STEPS, slowly
from jobs import last_step, write_recipe
from launched import WORDS, Launched, launch
from lost_hosts import Hosts, can_isolate
from resumable import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="hosts of their own need root"),
]

REPOSITORY = Path(__file__).parents[3]
EVERY = 5
COPYING = 2  # steps that may pass until a copy is whole
LOCAL = (
    *WORDS,
    "--config.checkpoint.every=30",
    f"--config.checkpoint.local={EVERY}",
)


def start(folder: Path, hosts: Hosts, *words: str, restarts: int = 1, least: int = 4):
    """Launches a job on four of five hosts; the fifth is spare."""
    write_recipe(folder, slowly)
    options = [
        f"--hosts={','.join(hosts.names[:4])}",
        f"--spare_hosts={hosts.names[4]}",
        f"--rsh={hosts.rsh}",
        f"--max_restarts={restarts}",
        f"--min_hosts={least}",
    ]
    return launch(folder, *options, words=[*LOCAL, *words])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes the whole run with these words, once."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*words: str) -> Path:
        if words not in made:
            folder = made[words] = tmp_path_factory.mktemp("undisturbed")
            with start(folder, Hosts(folder, 5), *words) as job:
                assert job.wait(180) == 0, job.err.read_text()
        return made[words] / "run"

    return make


def resumed_after(job: Launched) -> list[int]:
    """The steps after which the job has gone on from copies."""
    told = r"resuming run after step (\d+), from the hosts' copies$"
    return [int(x) for x in re.findall(told, job.out.read_text(), re.MULTILINE)]


def check_goes_on(job: Launched, reached: int, whole: Path) -> None:
    """It loses no more steps than it may, and computes what `whole` did."""
    assert job.wait(240) == 0, job.err.read_text()
    (step,) = resumed_after(job)
    assert 0 <= reached - step <= EVERY + COPYING, (reached, step)
    assert read_metrics(job.folder / "run") == read_metrics(whole)
    for index in range(5):  # nothing is left in memory
        memory = Path(job.folder / "hosts" / f"127.0.0.{index + 1}")
        assert not memory.exists() or list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("victim", "words"),
    [(0, ()), (3, ("--config.mesh.replica=2",))],
    ids=["first", "replicas"],
)
def test_a_lost_host_costs_the_steps_since_the_last_copy(
    victim, words, undisturbed, tmp_path
):
    """Process 0's too, which coordinates, and replicas', which send nothing."""
    whole = undisturbed(*words)
    hosts = Hosts(tmp_path, 5)
    with start(tmp_path, hosts, *words) as job:
        job.wait_for_step(random.randrange(EVERY + 2, 28))
        hosts.lose(victim, job.mark)
        reached = last_step(tmp_path / "run" / "metrics.jsonl")
        check_goes_on(job, reached, whole)
    assert f"no answer from {hosts.names[victim]}" in job.err.read_text()
    note = "replicas have the same state" if words else "for its neighbor"
    assert note in job.out.read_text()


def test_the_command_of_the_page_goes_on_without_a_host(tmp_path):
    text = (REPOSITORY / "docs/cluster/README.md").read_text()
    (command,) = re.findall(r"^python -m jshard.launch (--hosts=.*)$", text, re.M)
    options, trained = command.split(" -- ")
    hosts = Hosts(tmp_path, 4)
    assert "--hosts=a,b,c,d " in options
    options = options.replace("a,b,c,d", ",".join(hosts.names))
    assert trained == "--config=gpt.py --workdir=runs/gpt"
    write_recipe(tmp_path, slowly)
    rsh = f"--rsh={hosts.rsh}"
    words = [*LOCAL, "--config.batch_size=24"]  # which six devices divide, too
    with launch(tmp_path, *options.split(), rsh, words=words) as job:
        job.wait_for_step(EVERY + 2)
        hosts.lose(2, job.mark)
        assert job.wait(240) == 0, job.err.read_text()
    assert f"no answer from {hosts.names[2]}" in job.err.read_text()
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))


def test_killed_processes_go_on_where_they_are(undisturbed, tmp_path):
    whole = undisturbed()
    hosts = Hosts(tmp_path, 5)
    with start(tmp_path, hosts) as job:
        job.wait_for_step(random.randrange(EVERY + 2, 28))
        for index in (1, 2):
            os.kill(job.worker(index), signal.SIGKILL)
        check_goes_on(job, last_step(tmp_path / "run" / "metrics.jsonl"), whole)
    assert list(hosts.memory(4).iterdir()) == []  # the spare was not needed


def test_two_neighbors_lost_cost_the_steps_since_the_checkpoint(undisturbed, tmp_path):
    whole = undisturbed()
    hosts = Hosts(tmp_path, 6)
    hosts.names[4] += f",{hosts.names.pop()}"  # two spare hosts
    with start(tmp_path, hosts) as job:
        job.wait_for_step(43)
        for victim in (1, 2):
            hosts.lose(victim, job.mark)
        assert job.wait(240) == 0, job.err.read_text()
    told = r"resuming run after step 30; the copy of step 4\d on the hosts is not used:"
    assert re.search(
        f"{told} the part of process 1 is lost$", job.out.read_text(), re.M
    )
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


def test_fewer_hosts_go_on_from_the_checkpoint_and_say_so(tmp_path):
    hosts = Hosts(tmp_path, 5)
    with start(tmp_path, hosts, least=2) as job:
        job.wait_for_step(43)
        for index in (4, 1, 2):
            hosts.lose(index, job.mark)
        assert job.wait(240) == 0, job.err.read_text()
    told = r"resuming run after step 30; copies of step 4\d on the hosts are of another"
    assert re.search(told, job.out.read_text()), job.out.read_text()
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))


def test_hosts_may_be_lost_again_and_again(undisturbed, tmp_path):
    """At random moments, also while the job starts or copies; each returns empty."""
    whole = undisturbed()
    hosts = Hosts(tmp_path, 5)
    with start(tmp_path, hosts, restarts=20) as job:
        losses, reached = 0, 0
        while losses < 3 and job.process.poll() is None:
            reached = last_step(tmp_path / "run" / "metrics.jsonl")
            time.sleep(random.uniform(8, 25))
            if job.process.poll() is None:
                victim = random.randrange(5)
                hosts.lose(victim, job.mark)
                hosts.memory(victim).mkdir()
                losses += 1
        assert job.wait(600) == 0, job.err.read_text()
        assert reached
    assert read_metrics(tmp_path / "run") == read_metrics(whole)
