"""Two real processes: what one computes, signals, and going on when one was killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from failures import slowly
from jobs import Job, write_recipe
from processes import Processes
from resumable import RECIPE, read_metrics, train
from signalled_steps import step_until_signalled

WIDTH, LAYERS, ROWS, STEPS = 8, 2, 8, 2
ADAM = "optax.adamw("
CLOSE = 1e-5  # relative: roundings of float32, in another order


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, LAYERS, rngs=rngs)
        self.head = jshard.Unit(
            nnx.Linear(WIDTH, 1, rngs=rngs, param_dtype=jnp.float64)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))[:, 0]


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    error = (model(batch["x"]) - batch["x"].sum(1)) * batch["weight"]
    return jshard.Mean(jnp.sum(error**2), batch["weight"].sum())


def history() -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, in float64 on two devices."""
    with jax.enable_x64(True):
        devices = jax.devices()[:2]
        fsdp = jshard.FSDP(
            jshard.make_mesh(fsdp=2, devices=devices),
            jshard.Policy(min_shard_elements=0, prefetch=True),
        )
        tx = optax.adamw(1e-2)
        state, step = fsdp.init(Model, tx), fsdp.train_step(loss_fn, tx)
        part = slice(None)
        if jax.process_count() == 2:
            half = ROWS // 2
            part = slice(half * jax.process_index(), half * (jax.process_index() + 1))
        found = []
        for seed in range(STEPS):
            rng = np.random.default_rng(seed)
            batch = {"x": rng.normal(size=(ROWS, WIDTH)), "weight": rng.random(ROWS)}
            shards = fsdp.shard_batch({k: v[part] for k, v in batch.items()})
            state, metrics = step(state, shards)
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found


def refused_folder(folder: Path) -> str:
    with pytest.raises(jshard.UserError) as error:
        jshard.Checkpointer(folder)
    return str(error.value)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Processes]:
    """Two processes with a device each."""
    with Processes(2, 1, tmp_path_factory.mktemp("pair")) as processes:
        yield processes


def test_two_processes_compute_what_one_does_and_refuse_a_folder_together(
    pair, tmp_path
):
    want = history()
    assert want[-1][0] < want[0][0]
    for found in pair.call(history):
        np.testing.assert_allclose(found, want, rtol=1e-12)
    (tmp_path / "file").touch()
    for said in pair.call(refused_folder, tmp_path / "file" / "checkpoints"):
        assert said.startswith("cannot write checkpoints to ")


@pytest.mark.quick("SIGUSR1")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_one_process_stops_all_after_the_same_step(name, pair):
    ends = pair.call(step_until_signalled, name)
    step = ends[0][0]
    assert step > 10
    assert ends == [(step, "SIGTERM"), (step, name)]


def light(recipe: str) -> str:
    """Recipes of no more than is compared here: programs that compile fast."""
    assert ADAM in recipe
    return recipe.replace(ADAM, "optax.sgd(")


@pytest.mark.usefixtures("compiled_once")
def test_a_job_of_two_goes_on_after_one_was_killed_as_if_it_had_not_been(tmp_path):
    steps: dict[str, Any] = {"steps": 16, "eval_every": 0, "model__noise": 0}
    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", recipe=light(RECIPE), **steps)
    write_recipe(tmp_path, lambda recipe: slowly(light(recipe)))
    words = ["--config.steps=16", "--config.eval_every=0", "--config.model.noise=0"]
    words += ["--config.watch.silence=2", "--workdir=run"]
    with Job(tmp_path, 2, 1, *words) as job:
        job.wait_for_step(tmp_path / "run", 6)
        os.kill(job.worker(1), signal.SIGKILL)
        since = time.monotonic()
        assert job.wait(30) == [1, 1]
        assert time.monotonic() - since < 15
        assert "process 1, at step" in job.err(1)
        assert "error: process 1 gave no sign of life for 2 s" in job.err(0)
    # One process goes on; what the two computed and what it does is that of one.
    recipe = light(RECIPE)
    got = read_metrics(train(tmp_path, recipe=recipe, **steps, watch__silence=2))
    want = read_metrics(whole)
    assert [line["step"] for line in got] == list(range(1, 17))
    for line, other in zip(got, want, strict=True):
        assert line == pytest.approx(other, rel=CLOSE), line["step"]
