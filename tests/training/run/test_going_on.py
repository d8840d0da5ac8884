"""The smallest run that is killed and goes on: bit for bit the uninterrupted one."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jshard.storage.checkpoint.step_folders import find_steps
from resumable import read_metrics, train
from tiny_runs import IMPORTS

RECIPE = (
    IMPORTS
    + """

def get_config():
    return ConfigDict(
        {"steps": 5, "batch_size": 8, "eval_every": 0, "checkpoint": {"every": 2}}
    )


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = jshard.Unit(nnx.Linear(4, 8, rngs=rngs))
        self.dropout = jshard.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def make_model(config, rngs):
    return Model(rngs)


def make_optimizer(config):
    return optax.sgd(1e-2, momentum=0.9)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(model(batch["x"]) ** 2), len(batch["x"]))


def make_data(config, split):
    row = lambda i: {"x": np.full(4, i / 40, np.float32)}
    data = grain.MapDataset.range(40).map(row)
    return data.seed(config.seed).shuffle().repeat()
"""
)


def check_equal(got, want):
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    np.testing.assert_array_equal(got, want)


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.usefixtures("compiled_once")
def test_a_run_that_is_killed_goes_on_as_the_uninterrupted_one(tmp_path):
    whole = train(tmp_path, "whole", recipe=RECIPE)
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/5")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 6, "lo')  # cut by the kill
    assert find_steps(run / "checkpoints")[-1] == 4
    train(tmp_path, recipe=RECIPE)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert len({line["loss"] for line in lines}) == 5
    assert lines == read_metrics(whole)
    folder = "checkpoints/5/state"
    got, want = ocp.load(run / folder), ocp.load(whole / folder)
    for kind in ("params", "opt_state", "model_state", "step"):
        jax.tree.map(check_equal, got[kind], want[kind])
