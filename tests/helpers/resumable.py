"""A recipe whose runs can be compared step by step, and runs of it in this process."""

import json
from pathlib import Path

from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import check, complete
from jshard.recipe.load import open_recipe
from jshard.system.jobs.peers import Peers
from jshard.training.trainer import Trainer, fit_since

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
            "model": {"width": 16, "noise": 0.1},
            "optimizer": {"peak": 1e-2},
        }
    )


class Model(nnx.Module):
    def __init__(self, width, noise, rngs):
        self.embed = jshard.Unit(nnx.Embed(64, width, rngs=rngs))
        self.dropout = jshard.Dropout(0.1, rngs=rngs)
        self.noise = nnx.Dropout(noise, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(width, 64, rngs=rngs))

    def __call__(self, x):
        return self.head(self.noise(self.dropout(self.embed(x))))


def make_model(config, rngs):
    return Model(**config.model, rngs=rngs)


def learning_rate(config):
    return optax.cosine_decay_schedule(config.optimizer.peak, 100)


def make_optimizer(config):
    return optax.adamw(learning_rate(config))


def loss_fn(model, batch):
    tokens = batch["tokens"]
    loss = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    # Which tokens a step saw, and where: a mean that is exact in float32.
    places = jnp.arange(1.0, LENGTH + 1)
    seen = jnp.sum(tokens.astype(jnp.float32) ** 2 * places)
    named = {"token_sum": jshard.Mean(seen, len(tokens))}
    return jshard.Mean(loss.sum(), loss.size), named


def make_data(config, split):
    def example(i):
        return {"tokens": np.random.default_rng(i).integers(0, 64, LENGTH, np.int32)}

    data = grain.MapDataset.range(512).map(example)
    if split == "validation":
        return data[:16]
    return data.seed(config.seed).shuffle().repeat()
"""

TIMES = ("time", "per_second", "data_wait", "checkpoint_")


def read_metrics(workdir: Path) -> list[dict]:
    """All that a run computed: its lines without times."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    lines = [
        {k: v for k, v in line.items() if not any(name in k for name in TIMES)}
        for line in lines
    ]
    return [line for line in lines if len(line) > 1]


def train(
    folder: Path,
    workdir: str = "run",
    *,
    recipe: str = RECIPE,
    peers: Peers | None = None,
    **keys: object,
) -> Path:
    """Runs a recipe here, as the command line would; returns the run's folder.

    Args:
      folder: where the recipe and the run's folder are.
      workdir: the name of the latter.
      recipe: its text.
      peers: the processes of the run.
      keys: of the config, with "__" for dots.
    """
    (folder / "tiny.py").write_text(recipe)
    with open_recipe(folder / "tiny.py") as opened:
        config = complete(opened.get_config(), "tiny.py")
        values = {key.replace("__", "."): value for key, value in keys.items()}
        override(config, values, "tiny.py")
        check(config)
        trainer = Trainer(opened, config=config, workdir=folder / workdir, peers=peers)
        fit_since(trainer, keeps_state=False)
    return folder / workdir
