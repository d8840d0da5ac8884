"""`python -m jshard.launch`: which GPUs and which port the processes of a job get."""

import random
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import jshard.launch
from jobs import free_port, last_step, write_recipe
from jshard.system.errors import RunFailed
from jshard.system.jobs.cluster import PORT_TAKEN, Cluster, find_cluster
from jshard.system.jobs.job import join


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Jobs whose processes are of a shell; returns the words and settings of each."""
    program, folder = tmp_path / "python", tmp_path / "started"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(program))
    rsh = tmp_path / "rsh"
    rsh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    rsh.chmod(0o755)

    def start(*options: str, does: str = "exit 0") -> tuple[int, list[list[str]]]:
        program.write_text(
            "#!/bin/sh\n"
            f'f=$(mktemp {folder}/XXXXXX); for x in "$@"; do echo "$x" >> $f; done\n'
            f"env | grep ^JSHARD_ >> $f\n{does}\n"
        )
        program.chmod(0o755)
        words = [f"--rsh={rsh}", *options, "--", "--config=tiny.py"]
        launcher = jshard.launch.Launcher(*jshard.launch.parse(words))
        code = launcher.run()
        return code, [file.read_text().splitlines() for file in folder.iterdir()]

    return start


@pytest.mark.parametrize(
    "options",
    [
        ["--hosts=a,b", "--num_processes=4"],
        ["--hosts=a,a,b,b"],  # each twice
        ["--num_processes=2"],
    ],
)
def test_processes_of_one_host_share_its_gpus(options, started):
    code, processes = started(*options)
    assert code == 0
    given = []
    for lines in processes:
        words = dict(line.split("=", 1) for line in lines if "=" in line)
        job: dict[str, Any] = {"coordinator": words["--coordinator"]}
        job |= {
            name: int(words[f"--{name}"]) for name in ("num_processes", "process_id")
        }
        environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", **words}
        cluster = find_cluster(job, environ)
        assert cluster is not None
        given.append((cluster.process_id, cluster.local_device_ids))
    shares = [(0, 1), (2, 3)]
    assert sorted(given) == [(i, shares[i % 2]) for i in range(len(given))]
    assert len(given) == (2 if options == ["--num_processes=2"] else 4)


def test_gpus_that_processes_of_this_machine_cannot_share_are_told_once(
    started, monkeypatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for count in (3, 4):
        with pytest.raises(jshard.UserError, match=rf"{count} processes cannot share"):
            started(f"--num_processes={count}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which uses none
    assert started("--num_processes=3")[0] == 0


def test_a_port_that_is_taken_is_no_failure_but_another_is_tried(
    started, tmp_path, capsys
):
    first = f"""
    case "$*" in *--process_id=0*) ;; *) sleep 1; exit 0 ;; esac
    if mkdir {tmp_path}/again; then exit {PORT_TAKEN}; fi
    """
    since = time.monotonic()
    code, processes = started("--hosts=a,b", does=first)
    assert code == 0
    assert time.monotonic() - since < 10
    taken = re.findall(r"port (\d+) of .* is taken: trying", capsys.readouterr().err)
    words = "\n".join(line for lines in processes for line in lines)
    ports = set(re.findall(r"--coordinator=.*:(\d+)", words))
    assert len(taken) == 1
    assert len(ports) == 2
    assert set(taken) < ports
    assert all("JSHARD_ANY_PORT=1" in lines for lines in processes)


@pytest.mark.parametrize("options", [["--hosts=a,b"], ["--num_processes=2"]])
def test_the_processes_of_a_job_get_one_secret_by_no_command_line(
    options, started, monkeypatch
):
    monkeypatch.setenv("JSHARD_SECRET", "the user's own secret, for another job")
    shown = []
    popen = jshard.launch.subprocess.Popen

    def recorded(words, **options):
        shown.extend(words)
        return popen(words, **options)

    monkeypatch.setattr(jshard.launch.subprocess, "Popen", recorded)
    told = []
    for _ in range(2):
        code, processes = started(*options)
        assert code == 0
        found = [x for lines in processes for x in lines if x.startswith("JSHARD_SEC")]
        told.append({*found})
        assert len(found) == 2 * len(told)
    assert len(told[0]) == 1  # the same for both
    assert len(told[1]) == 2  # and another for the next job
    for secret in told[1]:
        assert len(secret.partition("=")[2]) == 64
        assert not any(secret.partition("=")[2] in word for word in shown)
    assert not any("the user's own secret" in word for word in shown)


def test_a_job_of_this_machine_meets_in_a_folder_that_others_cannot_enter(started):
    does = 'for x in "$@"; do case "$x" in --coordinator=unix:*) d=${x#*unix:};; esac; '
    does += 'done; echo "mode $(stat -c %a "$(dirname "$d")")" >> $f'
    code, processes = started("--num_processes=2", does=does)
    assert code == 0
    places = {x for lines in processes for x in lines if x.startswith("--coordinator=")}
    (place,) = places
    assert place.startswith("--coordinator=unix:/")
    assert all("mode 700" in lines for lines in processes)
    assert not Path(place.partition(":")[2]).parent.exists()


def test_a_host_without_a_free_port_is_given_up(started, monkeypatch):
    monkeypatch.setattr(jshard.launch, "PORTS", 2)
    with pytest.raises(RunFailed, match="2 ports of a are taken"):
        started("--hosts=a", does=f"exit {PORT_TAKEN}")


def test_a_port_that_the_user_chose_stays_bad_input(started):
    code, [lines] = started("--hosts=a", "--port=1234", does="exit 2")
    assert code == 2
    assert not any("JSHARD_ANY_PORT" in line for line in lines)


def test_process_0_says_whether_another_port_would_do(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        job = join(Cluster(0, 2, address, None, "options"))
        with pytest.raises(jshard.UserError, match="cannot listen there"):
            job.__enter__()
        monkeypatch.setenv("JSHARD_ANY_PORT", "1")
        job = join(Cluster(0, 2, address, None, "options"))
        with pytest.raises(SystemExit) as ended:
            job.__enter__()
        assert ended.value.code == PORT_TAKEN


@pytest.mark.slow
def test_a_job_trains_on_the_next_port_where_the_first_is_taken(
    tmp_path, monkeypatch, capfd
):
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    rsh = tmp_path / "rsh"
    rsh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    rsh.chmod(0o755)
    words = ["--hosts=127.0.0.1", "--num_processes=2", f"--rsh={rsh}", "--"]
    words += ["--config=tiny.py", "--config.steps=3"]
    words += ["--config.mesh.cpu_devices=2", "--workdir=run"]
    launcher = jshard.launch.Launcher(*jshard.launch.parse(words))
    with socket.create_server(("", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(random, "randrange", lambda *_: next(ports))
        assert launcher.run() == 0
    assert "is taken: trying another" in capfd.readouterr().err
    assert last_step(tmp_path / "run" / "metrics.jsonl") == 3
