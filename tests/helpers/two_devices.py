"""Steps on two devices, of one process or of two; apart, as it imports little."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard

WIDTH, LAYERS, ROWS, STEPS = 8, 2, 8, 2
# Draws that compile sooner than Flax's.
UNIFORM = nnx.initializers.uniform(0.3)


def linear(width: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        WIDTH, width, rngs=rngs, kernel_init=UNIFORM, param_dtype=jnp.float64
    )


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = linear(WIDTH, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, LAYERS, rngs=rngs)
        self.head = jshard.Unit(linear(1, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))[:, 0]


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    error = (model(batch["x"]) - batch["x"].sum(1)) * batch["weight"]
    return jshard.Mean(jnp.sum(error**2), batch["weight"].sum())


def history_within(*axes: str) -> list[tuple[float, float]]:
    """What ``history`` returns, within a mesh of Explicit axes of the caller's."""
    mesh = jax.make_mesh((2,) + (1,) * (len(axes) - 1), axes)
    with jax.set_mesh(mesh):
        return history()


def history() -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, in float64 on two devices."""
    with jax.enable_x64(True):
        devices = jax.devices()[:2]
        fsdp = jshard.FSDP(
            jshard.make_mesh(fsdp=2, devices=devices),
            jshard.Policy(min_shard_elements=0, prefetch=True),
        )
        tx = optax.sgd(1e-2, momentum=0.9)
        state, step = fsdp.init(Model, tx).copy(), fsdp.train_step(loss_fn, tx)
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
