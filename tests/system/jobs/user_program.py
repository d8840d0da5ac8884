"""A program of a user's own, which joins a job and trains: RANK COUNT ADDRESS HOW WHO.

In step 5 process WHO does what HOW says: raise, hang, or the name of a signal.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
import jshard.system.errors

ROWS = np.arange(256, dtype=np.float32).reshape(32, 8) / 256


def make_model(config, rngs):
    return nnx.Sequential(
        jshard.Unit(nnx.Linear(8, 64, rngs=rngs)),
        nnx.relu,
        nnx.Linear(64, 1, rngs=rngs),
    )


def loss_fn(model, batch):
    error = model(batch["inputs"])[:, 0] - batch["inputs"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def main(rank: int, count: int, address: str, how: str, victim: int) -> None:
    """Trains twice; the third time the loss is not finite, in all processes."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, rank)

    def on_step(trainer, step, metrics):
        if step != 5 or rank != victim:
            return
        if how == "raise":
            raise ValueError("no such pixel")
        if how == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), getattr(signal, how))

    def fit(steps, rows=ROWS):
        config = {"steps": steps, "batch_size": 12, "checkpoint.every": 3}
        jshard.Trainer(
            make_model=make_model,
            make_optimizer=lambda config: optax.sgd(0.01),
            loss_fn=loss_fn,
            train_data={"inputs": rows},
            config=config | {"watch.silence": 3, "watch.stuck": 6},
            workdir="run",
            on_step=on_step,
        ).fit()

    fit(3)
    fit(20)  # goes on from there
    print("done", flush=True)
    try:
        fit(30, rows=ROWS * np.nan)
    except jshard.RunFailed as error:
        print(f"told: {error}", flush=True)


if __name__ == "__main__":
    rank, count, address, how, victim = sys.argv[1:]
    main(int(rank), int(count), address, how, int(victim))
