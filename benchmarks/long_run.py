"""What a long run holds on to: `python FILE [--steps=100000]`.

jshard.Trainer trains a small model with a line of metrics and TensorBoard's scalars at
every step, and 50 evaluations, each with a report, and saves. At five points it
measures the process's memory and open files, and the size of the newest checkpoint.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

POINTS, SAVES, WIDTH = 5, 50, 64
ROWS = np.random.default_rng(0).normal(size=(256, WIDTH)).astype(np.float32)


def make_model(config: Any, rngs: nnx.Rngs) -> nnx.Module:
    return jshard.Unit(nnx.Linear(WIDTH, WIDTH, rngs=rngs))


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    error = (model(batch["inputs"]) - 1.0) ** 2
    return jshard.Mean(jnp.sum(error), len(error))


def resident() -> float:
    """Returns the MiB of this process that are in memory and not of a file."""
    text = Path("/proc/self/status").read_text()
    (line,) = [x for x in text.splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def size_of(folder: Path) -> float:
    """Returns the KiB of a folder's files."""
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()) / 1024


def measure(workdir: Path, steps: int) -> None:
    """Trains, and prints a row at each point."""
    print("| step | memory, MiB | open files | checkpoint, KiB | metrics.jsonl, KiB |")

    def at_checkpoint(trainer: Any, step: int, metrics: Any) -> None:
        if step % (steps // POINTS) == 0:
            files = len(os.listdir("/proc/self/fd"))
            saved = size_of(workdir / "checkpoints" / str(step))
            lines = (workdir / "metrics.jsonl").stat().st_size / 1024
            row = (step, resident(), files, saved, lines)
            print("|", " | ".join(f"{x:,.0f}" for x in row), "|", flush=True)

    jshard.Trainer(
        make_model=make_model,
        make_optimizer=lambda config: optax.adamw(1e-3),
        loss_fn=loss_fn,
        train_data={"inputs": ROWS},
        validation_data={"inputs": ROWS[:32]},
        config={
            "steps": steps,
            "batch_size": 8,
            "log_every": steps,
            "eval_every": steps // SAVES,
            "checkpoint.every": steps // SAVES,
        },
        workdir=workdir,
        on_checkpoint=at_checkpoint,
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    assert options.steps % SAVES == 0, f"--steps must be divisible by {SAVES}"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "run", options.steps)
    took = time.monotonic() - began
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    print(f"{took / 60:.1f} minutes on {device}, JAX {jax.__version__}")


if __name__ == "__main__":
    main()
