"""Two hosts, as network namespaces of this machine, and a cable between them cut."""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from failures import WORDS, check_end, check_names, go_on, slowly
from jobs import Job, write_recipe
from resumable import read_metrics


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
@pytest.mark.parametrize("step", [9, 40])
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
