"""Datasets by name: the real client, against a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopback_hub import LoopbackHub
from resumable import read_metrics

pytest.importorskip("datasets")
ROWS = 300  # of each of four files
WORDS = (
    *("--config=gpt.py", "--workdir=run", "--config.data.dataset=org/text"),
    *("--config.mesh.cpu_devices=2", "--config.eval_every=6", "--config.steps=6"),
    *("--config.model.width=16", "--config.model.sequence_length=32"),
    *("--config.model.num_layers=1", "--config.data.validation_rows=20"),
    *("--config.sample.length=0", "--config.checkpoint.every=3"),
    *("--config.batch_size=8", "--config.data.shuffle_rows=8"),
)


class Hub(LoopbackHub):
    commit = ""  # of the dataset


@pytest.fixture(scope="module")
def hub():
    def text(file: int) -> str:
        rows = [
            {"text": f"def f{file}_{row}(x): return x * {row}"} for row in range(ROWS)
        ]
        return "".join(json.dumps(row) + "\n" for row in rows)

    with Hub() as hub:
        files = {f"data/train-{i}.jsonl": text(i) for i in range(4)}
        hub.commit = hub.add("org/text", files, kind="datasets")
        yield hub


def run(hub: LoopbackHub, folder: Path, *words: str) -> Any:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "JAX_"))}
    root = str(Path(__file__).parents[2])
    more = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, "-m", "jshard.train", *WORDS, *words],
        cwd=folder,
        env=keep | hub.environment(folder / "cache") | more,
        capture_output=True,
        text=True,
        timeout=240,
    )


def read_of(hub: LoopbackHub, file: int) -> int:
    return hub.count("GET", f"train-{file}.jsonl")


@pytest.mark.slow
def test_a_run_streams_a_dataset_by_name_and_goes_on(hub, tmp_path):
    done = run(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    name = f"hf://datasets/org/text@{hub.commit}"
    assert f"train is the dataset {name}, split train: a resumed" in done.stdout
    whole = read_metrics(tmp_path / "run")
    assert {line["step"] for line in whole} == {*range(1, 7)}
    assert any("eval_loss" in line for line in whole)
    assert read_of(hub, 0) > 0
    assert [read_of(hub, file) for file in (2, 3)] == [0, 0]  # not needed yet
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    # The run keeps its commit, though there is a newer one.
    hub.add("org/text", {"data/train-0.jsonl": '{"text": "x"}'}, kind="datasets")
    again = run(hub, tmp_path)
    assert again.returncode == 0, again.stderr
    assert "after step 3" in again.stdout
    assert read_metrics(tmp_path / "run") == whole  # bit for bit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--config.data.dataset=org/none"],
            "neither a folder org/none here nor a dataset",
        ),
        (["--config.data.split=test"], "has no split 'test'; set data.split to one of"),
        (["--config.data.config=en"], "'en' not found. Available: ['default']"),
        (["--config.data.text_key=body"], "has no column 'body'; set data.text_key to"),
        (["--config.data.path=."], "data.dataset stands instead of data.path"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(words, said, hub, tmp_path):
    done = run(hub, tmp_path, *words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert said in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
