"""Two hosts, as network namespaces of this machine, and a cable between them cut."""

import subprocess
import time
from collections.abc import Iterator

import pytest

from failures import WORDS, check_end, check_names, go_on, slowly
from jobs import Job, write_recipe
from network import Network
from resumable import read_metrics


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
