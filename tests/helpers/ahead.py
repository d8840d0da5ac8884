"""Calls steps in a loop that never waits for one: ``python ahead.py DEVICES CALLS``."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

LOOPS = 400


class Model(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(64, 64, rngs=rngs)
        self.layers = jshard.Stack(layer, 3, rngs=rngs)
        self.head = jshard.Unit(layer(rngs))

    def __call__(self, x):
        return self.head(self.layers(x))


def loss_fn(model, batch):
    y = model(batch)
    return jshard.Mean(jnp.sum(y**2), y.size)


def main(devices: int, calls: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    optimizer = optax.adam(1e-3)
    state = fsdp.init(Model, optimizer)
    train_step, eval_step = fsdp.train_step(loss_fn, optimizer), fsdp.eval_step(loss_fn)
    batch = fsdp.shard_batch(np.ones((2 * devices, 64), np.float32))
    total: Any = 0
    for _ in range(LOOPS):
        if calls != "eval":
            state, _ = train_step(state, batch)
        if calls != "train":
            total = total + eval_step(state, batch)
    jax.block_until_ready((state, total))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
