"""Time per step of jshard.Trainer over the bare jitted step: `python FILE [--steps=N]`.

Both train the same model on the same batches, read by the same threads, in this
process and in turns; the bare loop runs two steps ahead, as the Trainer does. All
loggers of a run folder are on: metrics at every tenth step, TensorBoard, a hook at
every step, the display, and Weights & Biases (offline) and MLflow (files) if they are
installed. Compilation, evaluations and saves are not counted.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from jshard.training.data.batches import batches
from jshard.training.data.dataset import as_dataset

BATCH, WIDTH, LAYERS = 64, 256, 4
ROWS = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)


def make_model(config, rngs):
    def block(rngs):
        return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu)

    return jshard.Stack(block, LAYERS, rngs=rngs)


def make_optimizer(config):
    return optax.adamw(1e-3)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum((model(batch["inputs"]) - 1.0) ** 2), BATCH)


def trainer_times(folder: Path, steps: int) -> list[float]:
    """Seconds of each step, with everything that logs."""
    times: list[float] = []
    installed = {
        "logger.wandb": importlib.util.find_spec("wandb"),
        "logger.mlflow": importlib.util.find_spec("mlflow"),
    }
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{folder / 'mlflow'}"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    config = {
        "steps": steps,
        "batch_size": BATCH,
        "log_every": 10,
        "checkpoint.every": 0,
        **{key: "overhead" for key, found in installed.items() if found},
    }
    jshard.Trainer(
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        train_data={"inputs": ROWS},
        config=config,
        workdir=folder / "run",
        on_step=lambda trainer, step, metrics: times.append(time.perf_counter()),
    ).fit()
    return list(np.diff(times)[5:])


def bare_times(steps: int) -> list[float]:
    """The same with the jitted step alone, on the same batches."""
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh()), make_optimizer(None)
    state = fsdp.init(lambda rngs: make_model(None, rngs), optimizer)
    step = fsdp.train_step(loss_fn, optimizer)
    data = as_dataset({"inputs": ROWS}, 0, repeat=True)
    history, times = [], []
    for batch in batches(data, batch_size=BATCH, start_step=0, num_steps=steps):
        state, metrics = step(state, fsdp.shard_batch(batch))
        history.append(metrics["loss"])
        jax.block_until_ready(history[-3:-2])
        times.append(time.perf_counter())
    return list(np.diff(times)[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bare, whole = [], []
    for _ in range(options.rounds):
        bare += bare_times(options.steps)
        with tempfile.TemporaryDirectory() as folder:
            whole += trainer_times(Path(folder), options.steps)
    one, other = statistics.mean(bare), statistics.mean(whole)
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    for name, times in (("bare step", bare), ("Trainer", whole)):
        mean, median = statistics.mean(times), statistics.median(times)
        print(f"{name:<10} mean {mean * 1e3:.3f} ms  median {median * 1e3:.3f} ms")
    more = other - one
    print(f"overhead   {more * 1e3:.3f} ms a step, {more / one:.1%}")


if __name__ == "__main__":
    main()
