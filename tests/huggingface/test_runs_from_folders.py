"""Runs that start from a Hugging Face folder, end, resume, and are exported."""

import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mapped import RECIPE, write_folder

from exports import load_all
from jobs import Job, environment
from tiny_runs import expect_one_line, read_metrics

FROM = ("--config.model.from=hf", "--config.checkpoint.restore=hf")


def export(folder: Any, *words: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "jshard.export", "run", "--format=huggingface", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_a_run_from_a_folder_and_back(train, tmp_path):
    sizes = {"layers": 3, "width": 16, "experts": 4}
    want = write_folder(tmp_path / "hf", sizes=sizes)
    run = train(
        tmp_path, "--config=tiny.py", *FROM, "--workdir=run", recipe=RECIPE
    )  # of rate 0
    assert run.returncode == 0, run.stderr
    assert "starting from the parameters of hf" in run.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == {
        "from": "hf",
        "ignore": "",
        "layers": 3,
        "width": 16,
        "experts": 4,
        "eps": 1e-6,
        "length": 4,
    }
    done = export(tmp_path, "--output=out", "--max_shard_size=2KB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"exported step 1: {len(want)} tensors in out; ")
    assert "tokenizer of hf; generation config of hf" in done.stdout
    got = load_all(tmp_path / "out")
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
    again = export(tmp_path, "--output=out")
    expect_one_line(again, 2, "--output=out holds")

    # The folder is gone: the run knows what it trains.
    shutil.rmtree(tmp_path / "hf")
    words = (*FROM, "--workdir=run", "--config.steps=2")
    run = train(tmp_path, "--config=tiny.py", *words, recipe=RECIPE)
    assert run.returncode == 0, run.stderr
    assert "resuming run after step 1" in run.stdout
    assert len(read_metrics(tmp_path / "run")) == 4  # two steps, each with its save
    other = train(tmp_path, "--config=tiny.py", *FROM, "--workdir=other", recipe=RECIPE)
    expect_one_line(other, 2, "hf does not exist: a Hugging Face folder holds")
    # The recipe is gone, too.
    (tmp_path / "tiny.py").rename(tmp_path / "moved.py")
    expect_one_line(export(tmp_path, "--output=two"), 2, "give --config=RECIPE")
    done = export(tmp_path, "--output=two", "--config=moved.py")
    assert done.returncode == 0, done.stderr
    assert "no tokenizer in hf" in done.stdout


@pytest.mark.slow  # by default, test_decoder_configs
def test_the_architecture_alone(train, tmp_path):
    write_folder(tmp_path / "hf", sizes={"layers": 3, "width": 8, "experts": 2})
    for file in (tmp_path / "hf").glob("*.safetensors*"):
        file.unlink()
    run = train(
        tmp_path,
        "--config=tiny.py",
        FROM[0],
        "--config.model.experts=1",
        "--workdir=run",
        "--config.checkpoint.every=0",
        recipe=RECIPE,
    )
    assert run.returncode == 0, run.stderr
    assert "starting from the parameters" not in run.stdout
    model = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert (model["layers"], model["experts"]) == (3, 1)


# Leaves which bytes of the files each process reads in the folder "seen".
RECORDING = """
import pathlib

from jshard.storage.hub.safetensors_file import StoredTensor

opened = StoredTensor.open


class Recorded(np.ndarray):
    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(part, np.ndarray):
            with open(f"seen-{jax.process_index()}", "a") as file:
                file.write(f"{self.name} {part.size}\\\\n")
        return part

    def __array_finalize__(self, other):
        self.name = getattr(other, "name", "")


def recording(self):
    found = opened(self).view(Recorded)
    found.name = f"{self.file.name}:{self.offset}"
    return found


StoredTensor.open = recording
"""


@pytest.mark.slow
def test_two_processes_read_their_parts(tmp_path):
    sizes = {"layers": 2, "width": 32, "experts": 2}
    want = write_folder(tmp_path / "hf", sizes=sizes)
    (tmp_path / "tiny.py").write_text(RECIPE + RECORDING.replace("\\\\", "\\"))
    with Job(tmp_path, 2, 4, *FROM, "--workdir=run") as job:
        assert job.wait() == [0, 0], job.err()
    total = sum(array.size for array in want.values())
    for index in range(2):
        lines = (tmp_path / f"seen-{index}").read_text().splitlines()
        read = sum(int(line.split()[1]) for line in lines)
        assert read < 0.6 * total, (read, total)
    done = export(tmp_path, "--output=out")
    assert done.returncode == 0, done.stderr
    got = load_all(tmp_path / "out")
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
