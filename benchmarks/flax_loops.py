"""How long Python takes to start a step: Flax's loops beside a jshard step.

    JAX_PLATFORMS=cpu python benchmarks/flax_loops.py

prints milliseconds of the calling thread's CPU time, which waits for no device.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

WIDTH, CALLS, ROUNDS = 8, 20, 5


class Block(nnx.Module):
    """A layer of six parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        """Returns an array of the shape of ``x``, (B, D)."""
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def milliseconds(call: Callable[[], jax.Array]) -> float:
    """Returns the calling thread's CPU time of a call, the least of some rounds."""
    for _ in range(3):
        jax.block_until_ready(call())
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(CALLS):
            start = time.thread_time()
            result = call()
            spent += time.thread_time() - start
            jax.block_until_ready(result)
        rounds.append(spent / CALLS * 1e3)
    return min(rounds)


def compare(layers: int) -> None:
    """Prints a row of the table in docs/coming_from/nnx.md."""
    rngs, tx = nnx.Rngs(0), optax.adamw(1e-3)
    model = nnx.Sequential(*[Block(rngs) for _ in range(layers)])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = np.ones((8, WIDTH), np.float32)

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, x: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
        return jshard.Mean(jnp.sum(model(x) ** 2), x.size)

    fsdp = jshard.FSDP(jshard.make_mesh(), units=(Block,))
    state, train_step = fsdp.from_model(model, optimizer), fsdp.train_step(loss_fn, tx)
    batch = fsdp.shard_batch(x)

    def sharded() -> jax.Array:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"]

    cached = nnx.cached_partial(step, model, optimizer)
    arrays = len(jax.tree.leaves(state))
    eager = milliseconds(lambda: step(model, optimizer, x))
    rest = milliseconds(lambda: cached(x)), milliseconds(sharded)
    print(f"| {layers} | {arrays} | {eager:.1f} | {rest[0]:.1f} | {rest[1]:.1f} |")


if __name__ == "__main__":
    print("| blocks | arrays | nnx.jit | nnx.cached_partial | jshard |")
    for layers in (4, 16, 32):
        compare(layers)
