"""Strangers at every port of a running job: it ends with the same bits as without."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs import marked, write_recipe
from launched import Launched
from network import Network

STEPS = 150
WORDS = (
    "--config=tiny.py",
    f"--config.steps={STEPS}",
    "--config.mesh.cpu_devices=2",
    "--config.checkpoint.every=50",
    "--config.checkpoint.local=10",
    "--workdir=run",
)
# As another user, until it is killed: says nothing, garbage, and what jshard's own say.
STRANGER = r"""
import encodings.idna, os, socket, sys, time
os.setgroups([]), os.setgid(65534), os.setuid(65534)
door = sys.argv[1].removeprefix("unix:")
try:
    socket.socket(socket.AF_UNIX).connect(door)
except PermissionError:
    print("may not enter", flush=True)
hello = b"0" * 64 + b" " + b"0" * 64 + b' {"process": 1, "processes": 9}\n'
http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
kept, reached = [], set()
while True:
    for address in sys.argv[2:]:
        host, _, port = address.rpartition(":")
        for text in (b"", hello, http2, b"x" * 100_000, bytes(8)):
            try:
                connection = socket.create_connection((host, int(port)), 1)
                if address not in reached:
                    reached.add(address)
                    print("reached", address, flush=True)
                connection.sendall(text)
            except OSError:
                continue
            kept = [*kept[-50:], connection]
    time.sleep(0.01)
"""


def ports(job: Launched, prefix: Sequence[str]) -> list[str]:
    """Where the processes of a job listen."""
    listed = [*prefix, "ss", "-ltnpH"]
    lines = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    mine = {f"pid={pid}," for pid in marked(job.mark)}
    found = [
        line.split()[3] for line in lines.splitlines() if any(m in line for m in mine)
    ]
    return [address.replace("[::ffff:", "").replace("]", "") for address in found]


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [(x["loss"], x["grad_norm"]) for x in lines if "loss" in x]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="makes networks, and other users")
def test_strangers_neither_end_nor_change_a_job(tmp_path):
    network = Network()
    strangers: list[subprocess.Popen[str]] = []
    try:
        for name in ("alone", "hammered"):
            (tmp_path / name).mkdir()
            write_recipe(tmp_path / name)
        alone = Launched(tmp_path / "alone", "--num_processes=2", words=WORDS)
        assert alone.wait(240) == 0
        inside = network.run_in(0)
        job = Launched(
            tmp_path / "hammered", "--num_processes=2", words=WORDS, prefix=inside
        )
        job.wait_for_step(5)
        found = ports(job, inside)
        assert len(found) == 4, found  # Gloo's, and for local copies
        assert sum(x.startswith(network.address(0)) for x in found) == 2
        cmdline = Path(f"/proc/{job.worker(1)}/cmdline").read_text()
        (door,) = re.findall(r"--coordinator=(unix:[^\0]*)", cmdline)
        program = [sys.executable, "-c", STRANGER]
        for index in range(2):
            strangers.append(
                subprocess.Popen(
                    [*network.run_in(index), *program, door, *found],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        assert job.wait(240) == 0
    finally:
        for stranger in strangers:
            stranger.kill()
        network.remove()
    said = [stranger.communicate()[0] for stranger in strangers]
    assert all("may not enter" in text for text in said)
    assert {x for x in found if x in said[0]} == {*found}  # another user reaches all
    assert {x for x in found if x in said[1]} == {  # and another host Gloo's
        x for x in found if x.startswith(network.address(0))
    }
    assert len(losses(job.folder)) == STEPS
    assert losses(job.folder) == losses(tmp_path / "alone")
    err = job.err.read_text()
    for index in range(2):
        assert err.count(f"process {index}'s door for local copies: turned away") == 1
