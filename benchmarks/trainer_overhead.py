"""Time per step of jshard.Trainer over the bare jitted step: `python FILE [--pairs=N]`.

Both train the same model on the same data, read by the same threads, in one process and
in turns: at the end of each block of the Trainer's steps a hook runs as many bare ones.
Both loops are two steps ahead of the devices, and each block begins and ends with idle
devices, so that a block costs the same to start in both. All loggers are on: a line of
metrics and TensorBoard's scalars at every step, a hook at every step, the display, and
Weights & Biases (offline) and MLflow (files) where they are installed. What they do in
other threads and processes slows the Trainer's blocks, which are longer than the time
between two batches of theirs. Compilation, evaluations and saves are not counted.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from jshard.data.batches import batches
from jshard.data.dataset import as_dataset

BATCH, WIDTH, LAYERS = 64, 256, 4
ROWS = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)


def make_model(config: Any, rngs: nnx.Rngs) -> nnx.Module:
    def block(rngs):
        return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu)

    return nnx.Sequential(jshard.Stack(block, LAYERS, rngs=rngs))


def make_optimizer(config: Any) -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    error = (model(batch["inputs"]) - 1.0) ** 2
    return jshard.Mean(jnp.sum(error), len(error))


def make_bare(total: int) -> Callable[[int], float]:
    """Returns a function that makes some steps, and returns their seconds."""
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh()), make_optimizer(None)
    state = fsdp.init(lambda rngs: make_model(None, rngs), optimizer)
    step = fsdp.train_step(loss_fn, optimizer)
    data = as_dataset({"inputs": ROWS}, 0, repeat=True)
    following = batches(data, batch_size=BATCH, start_step=0, num_steps=total)

    def run(steps: int) -> float:
        nonlocal state
        began = time.perf_counter()
        history = []
        for _ in range(steps):
            state, metrics = step(state, fsdp.shard_batch(next(following)))
            history.append(metrics["loss"])
            jax.block_until_ready(history[-3:-2])
        jax.block_until_ready(state)
        return time.perf_counter() - began

    return run


def measure(folder: Path, block: int, pairs: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of a step in each block, bare and of the Trainer."""
    bare, whole, warm_up = [], [], 2  # blocks that compile
    total = block * (pairs + warm_up)
    run_bare = make_bare(total)
    began = time.perf_counter()

    def in_turns(trainer: Any, step: int, metrics: Any) -> None:
        nonlocal began
        if step % block:
            return
        jax.block_until_ready(trainer.state)
        whole.append((time.perf_counter() - began) / block)
        time.sleep(0.3)  # threads that log are done with their last batch
        bare.append(run_bare(block) / block)
        began = time.perf_counter()

    config = {"steps": total, "batch_size": BATCH, "log_every": 10}
    config |= {"checkpoint.every": 0} | with_services(folder)
    jshard.Trainer(
        make_model=make_model,
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        train_data={"inputs": ROWS},
        config=config,
        workdir=folder / "run",
        on_step=in_turns,
    ).fit()
    return bare[warm_up:], whole[warm_up:]


def with_services(folder: Path) -> dict[str, str]:
    """Returns the keys of the services that are installed; they write to a folder."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{folder / 'mlflow'}"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    found = filter(importlib.util.find_spec, ("wandb", "mlflow"))
    return {f"logger.{name}": "overhead" for name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", type=int, default=300, help="steps of a block")
    parser.add_argument("--pairs", type=int, default=20, help="blocks of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        services = ", ".join(with_services(Path(folder))) or "no services"
        bare, whole = measure(Path(folder), options.block, options.pairs)
    more = [b - a for a, b in zip(bare, whole, strict=True)]
    ratios = [b / a for a, b in zip(bare, whole, strict=True)]
    print(f"\n{jax.device_count()} x {jax.devices()[0].device_kind}; {services}")
    for name, times in (("bare", bare), ("Trainer", whole), ("more", more)):
        low, middle, high = statistics.quantiles(times, n=4)
        spread = f"quartiles {low * 1e3:.3f} to {high * 1e3:.3f}"
        print(f"{name:<8} {middle * 1e3:.3f} ms a step, {spread}")
    print(f"ratio    {statistics.median(ratios):.3f}, the median of the pairs'")


if __name__ == "__main__":
    main()
