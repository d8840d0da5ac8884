"""A recipe that trains in a moment, and what its runs leave and say."""

import json

IMPORTS = """\
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard
"""
RECIPE = (
    IMPORTS
    + """\
from jshard.data.text.text_data import text_data


def get_config():
    return ConfigDict(
        {
            "steps": 6,
            "batch_size": 16,
            "log_every": 2,
            "eval_every": 3,
            "nan_at_step": 0,
            "mesh": {"cpu_devices": 2},
            "data": {"path": ""},
        }
    )


def make_model(config, rngs):
    return nnx.Sequential(
        jshard.Unit(nnx.Linear(8, 64, rngs=rngs)),
        nnx.relu,
        nnx.Linear(64, 1, rngs=rngs),
    )


def learning_rate(config):
    return optax.linear_schedule(0.1, 0.0, 10)


def make_optimizer(config):
    return optax.sgd(learning_rate(config))


def loss_fn(model, batch):
    error = model(batch["x"])[:, 0] - batch["x"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def make_data(config, split):
    if config.data.path:
        return text_data(config.data.path, split, sequence_length=8, seed=config.seed)
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    data = grain.MapDataset.source(rows).map(lambda row: {"x": row})
    if split == "validation":
        return data[:32]
    bad = range(*(config.batch_size * (config.nan_at_step - i) for i in (1, 0)))
    return data.seed(config.seed).shuffle().repeat().map_with_index(
        lambda i, x: {"x": x["x"] * np.float32(np.nan if i in bad else 1)}
    )


def references(config):
    return {"devices": float(jax.device_count())}


def sample(config):
    prompts = np.ones((1, 8), np.float32)
    return lambda model, x: model(x), prompts, lambda row: f"<{len(row)}>\\x1b[2J"
"""
)


def read_metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def expect_one_line(run, code, said):
    assert run.returncode == code, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("jshard: error: ")
    assert said in line
