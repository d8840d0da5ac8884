"""What torchrun starts trains as one job."""

import subprocess
import sys

import pytest

from jobs import environment, free_port, write_recipe
from resumable import read_metrics

WORDS = "--config=tiny.py --config.steps=2 --config.eval_every=0 --workdir=run".split()


@pytest.mark.slow  # by default, test_schedulers
def test_what_torchrun_starts_is_one_job(tmp_path):
    write_recipe(tmp_path)
    of_all = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    of_all |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    of_all |= {"MASTER_PORT": str(free_port() - 1)}
    words = [sys.executable, "-m", "jshard.train", *WORDS]
    started = [
        subprocess.Popen(
            [*words, "--config.mesh.cpu_devices=1"],
            cwd=tmp_path,
            env=environment() | of_all | {"RANK": str(i), "LOCAL_RANK": str(i)},
        )
        for i in range(2)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    assert len(read_metrics(tmp_path / "run")) == 2
    assert "mesh            2 x cpu" in (tmp_path / "run" / "notes.json").read_text()
