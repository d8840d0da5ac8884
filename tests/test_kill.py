"""A run that is killed at any moment goes on as if nothing had happened."""

import json
import random
import re
import subprocess
import time
from pathlib import Path

import pytest

RECIPE = """\
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard

LENGTH = 8


def get_config():
    return ConfigDict(
        {
            "steps": 100,
            "batch_size": 8,
            "log_every": 1,
            "eval_every": 10,
            "mesh": {"cpu_devices": 4},
            "policy": {"min_shard_elements": 0, "ema_decay": 0.9},
            "checkpoint": {"every": 4, "keep": 2},
        }
    )


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = jshard.Unit(nnx.Embed(64, 16, rngs=rngs))
        self.dropout = jshard.Dropout(0.1, rngs=rngs)
        self.noise = nnx.Dropout(0.1, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(16, 64, rngs=rngs))

    def __call__(self, x):
        return self.head(self.noise(self.dropout(self.embed(x))))


def make_model(config, rngs):
    return Model(rngs)


def learning_rate(config):
    return optax.cosine_decay_schedule(1e-2, config.steps)


def make_optimizer(config):
    return optax.adamw(learning_rate(config))


def loss_fn(model, batch):
    tokens = batch["tokens"]
    loss = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    # Which tokens a step saw at each position: sums that are exact in float32.
    sums = jnp.sum(tokens.astype(jnp.float32) ** 2, axis=0)
    seen = {f"token_{i}": jshard.Mean(sums[i], 1.0) for i in range(LENGTH)}
    return jshard.Mean(loss.sum(), loss.size), seen


def make_data(config, split):
    def example(i):
        return {"tokens": np.random.default_rng(i).integers(0, 64, LENGTH, np.int32)}

    data = grain.MapDataset.range(512).map(example)
    if split == "validation":
        return data[:16]
    return data.seed(config.seed).shuffle().repeat()
"""

TIMES = ("time", "per_second", "checkpoint_")


def read_metrics(workdir: Path) -> list[dict]:
    """All that a run computed: its lines without times."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    lines = [
        {k: v for k, v in line.items() if not any(name in k for name in TIMES)}
        for line in lines
    ]
    return [line for line in lines if len(line) > 1]


def reported(output: str, pattern: str) -> list[int]:
    return [int(step) for step in re.findall(pattern, output, re.MULTILINE)]


def wait_for_save(checkpoints: Path, process: subprocess.Popen, suffix: str) -> None:
    """Until a save (or a deletion) is going on, or the process has ended."""
    while process.poll() is None and not any(checkpoints.glob(f"*{suffix}")):
        time.sleep(0.0005)


def check_kills(kills: int, command, folder: Path, seed: int = 0) -> None:
    (folder / "tiny.py").write_text(RECIPE)
    steps = 10 * kills
    words = ("--config=tiny.py", f"--config.steps={steps}", "--workdir")
    run = subprocess.run(timeout=300, **command(folder, *words, "whole"))
    assert (run.returncode, run.stderr) == (0, "")

    chance = random.Random(seed)
    checkpoints = folder / "killed/checkpoints"
    done, saved = 0, 0
    for restart in range(20 * kills):
        with open(folder / f"{restart}.log", "w+") as log:
            options = command(folder, *words, "killed") | {"stdout": log, "stderr": log}
            process = subprocess.Popen(**options)
            try:
                kind = chance.choice(["anywhere", ".saving", ".saving", ".deleting"])
                if done < kills and kind == "anywhere":
                    time.sleep(chance.uniform(0, 6))
                elif done < kills:
                    wait_for_save(checkpoints, process, kind)
                    time.sleep(chance.uniform(0, 0.1))
                else:
                    process.wait(timeout=300)
            finally:
                process.kill()
                code = process.wait()
            log.seek(0)
            output = log.read()
        assert code in (0, -9), output
        # What was reported as saved is where it goes on, or later.
        for resumed in reported(output, r"^resuming killed after step (\d+)"):
            assert resumed >= saved
        saved = max([saved, *reported(output, r"^step (\d+)/\d+  checkpoint saved")])
        done += code == -9
        if code == 0:
            break
    assert done >= kills
    assert saved == steps
    assert read_metrics(folder / "killed") == read_metrics(folder / "whole")
    found = sorted(path.name for path in checkpoints.iterdir())
    assert found == sorted(p.name for p in (folder / "whole/checkpoints").iterdir())


def test_ten_kills_at_any_moment_lose_repeat_and_change_nothing(command, tmp_path):
    check_kills(10, command, tmp_path)


@pytest.mark.slow
def test_fifty_kills_at_any_moment_lose_repeat_and_change_nothing(command, tmp_path):
    check_kills(50, command, tmp_path, seed=1)
