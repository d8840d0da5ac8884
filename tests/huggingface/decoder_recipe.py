"""A recipe that trains any decoder of models/llama.py on given tokens, and its runs."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from jobs import environment
from tiny_runs import IMPORTS, read_metrics

RECIPE = (
    IMPORTS
    + """\
from jshard.models import llama_huggingface as huggingface
from jshard.models.llama import Llama, LlamaConfig


def get_config():
    return ConfigDict(
        {
            "steps": 1,
            "batch_size": 8,
            "log_every": 1,
            "policy": {"min_shard_elements": 0},
            "model": {"loss_chunk": 256},
            "tokens": "tokens.npy",  # rows, one token more than is trained on
            "rate": 0.0,
        }
    )


def make_model(config, rngs):
    return Llama(LlamaConfig(**config.model), rngs=rngs)


def make_optimizer(config):  # the defaults of torch.optim.AdamW
    return optax.adamw(config.rate, weight_decay=0.01)


def loss_fn(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return model.loss(inputs, targets, jnp.ones(targets.shape, jnp.float32))


def make_data(config, split):
    rows = np.load(config.tokens).astype(np.int32)
    return grain.MapDataset.source(rows).map(lambda row: {"tokens": row}).repeat()
"""
)


def python(folder: Path, *words: str, **settings: str) -> str:
    """Runs a module of ours in a folder; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment() | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(
    folder: Path, source: Path, rows: np.ndarray, *words: str, **settings: str
) -> list[float]:
    """Trains from a Hugging Face folder, as `run`; returns the losses, one a step."""
    np.save(folder / "tokens.npy", rows)
    (folder / "decoder.py").write_text(RECIPE)
    python(
        folder,
        "jshard.train",
        "--config=decoder.py",
        f"--config.model.from={source}",
        f"--config.checkpoint.restore={source}",
        f"--config.model.sequence_length={rows.shape[1] - 1}",
        "--workdir=run",
        *words,
        **settings,
    )
    return [line["loss"] for line in read_metrics(folder / "run") if "loss" in line]
