"""Whole runs on tokenized, packed and mixed text, and on chats."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_tokenizer import CHATML, TEXT, make_tokenizer

pytest.importorskip("tokenizers")
REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "steps": 6, "batch_size": 8, "log_every": 1, "eval_every": 3, "checkpoint.every": 3,
    "mesh.cpu_devices": 4, "model.vocab_size": 350, "model.sequence_length": 64,
    "model.width": 16, "model.num_layers": 2, "sample.length": 20, "data.pack": True,
    "data.max_segments": 8,
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """Runs gpt.py to the end; returns what it printed and its metrics."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(CHATML)

    def run(workdir: str, **config):
        path = os.environ.get("PYTHONPATH", "")
        config = SMALL | {"data.tokenizer": folder} | config
        words = [f"--config.{key}={value}" for key, value in config.items()]
        done = subprocess.run(
            [sys.executable, "-m", "jshard.train", "--config=gpt.py",
             f"--workdir={workdir}", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), path])},
            text=True,
            capture_output=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        return done.stdout, {row["step"]: row["loss"] for row in rows if "loss" in row}

    return run


@pytest.mark.slow
def test_a_resumed_run_on_a_mixture_sees_the_same_batches(train, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(90))
    )
    (tmp_path / "b").mkdir()
    for i in range(30):
        (tmp_path / f"b/{i}.txt").write_text(TEXT[i:])
    sources = {"data.mixture": "a.jsonl:0.7,b:0.3"}
    out, whole = train("whole", **sources)
    assert "sample:" in out
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/6")
    _, resumed = train("resumed", **sources)
    assert len(whole) == 6
    assert resumed == whole


@pytest.mark.slow
def test_a_run_on_chats_learns_the_answers(train, tmp_path):
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = {"role": "assistant", "content": "The capital of France is Paris."}
    line = json.dumps({"messages": [question, answer]}) + "\n"
    (tmp_path / "chats.jsonl").write_text(line * 300)
    often = {"eval_every": 40, "checkpoint.every": 40}
    _, losses = train("chats", **{"data.path": "chats.jsonl", "steps": 40, **often})
    assert losses[40] < 0.8 * losses[1]
