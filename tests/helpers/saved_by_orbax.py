"""A model that Flax trains, and Orbax saves, without jshard."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jshard

WIDTH, OUT = 5, 3  # which no mesh of 2, 4 or 8 divides
POLICY = jshard.Policy(min_shard_elements=0)
TX = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(
        optax.linear_schedule(1e-2, 0.0, 20),
        mask=lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params),
    ),
)
BATCHES = np.random.default_rng(1).normal(size=(5, 8, WIDTH))


class Model(nnx.Module):
    """Layers in a list, a statistic, and masks that are drawn."""

    def __init__(self, rngs: nnx.Rngs):
        wide: dict[str, Any] = {"param_dtype": np.float64, "rngs": rngs}
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, **wide) for _ in range(2)])
        self.dropout = jshard.Dropout(0.2, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH, np.float64))
        self.head = nnx.Linear(WIDTH, OUT, **wide)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        mean = jshard.pmean(jnp.mean(x, axis=0))
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * mean)
        return self.head(self.dropout(x) - self.mean[...])


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.shape[0])


def save(folder: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def make_fsdp(devices: int = 8) -> jshard.FSDP:
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    return jshard.FSDP(mesh, POLICY, units=(nnx.Linear,))


@functools.cache
def wanted() -> tuple[jshard.FSDP, jshard.TrainState]:
    """An FSDP on eight devices, and its abstract state; in float64."""
    fsdp = make_fsdp()
    return fsdp, fsdp.abstract_state(Model, TX)


def manager(folder: Path, tree: Any) -> None:
    with ocp.CheckpointManager(folder) as steps:
        steps.save(1, args=ocp.args.StandardSave(jax.tree.map(jnp.zeros_like, tree)))
        steps.save(8, args=ocp.args.StandardSave(tree))
