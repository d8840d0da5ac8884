"""Meshes, policies and a model of the tests of pipelines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard


def mesh_of(**sizes: Any) -> jax.sharding.Mesh:
    number = int(np.prod(list(sizes.values())))
    return jshard.make_mesh(**sizes, devices=jax.devices()[:number])


def policy_of(accumulate: int = 4, **fields: Any) -> jshard.Policy:
    return jshard.Policy(accumulate=accumulate, min_shard_elements=0, **fields)


class Layers(nnx.Module):
    """Equal layers, in one Stack or several."""

    blocks0: jshard.Stack

    def __init__(self, rngs: nnx.Rngs, layer: Any = None, stacks: int = 1):
        layer = layer or (lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        for i in range(stacks):
            setattr(self, f"blocks{i}", jshard.Stack(layer, 4, rngs=rngs))
        self.head = jshard.Unit(nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x: jax.Array) -> Any:
        return self.head(self.blocks0(x))


def mean(model: Any, batch: Any) -> Any:
    y = model(batch)
    return jshard.Mean(jnp.sum(y**2), y.size)
