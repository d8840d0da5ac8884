"""README.md's five lines in the program of a user whose type checker is strict.

tests/project/test_packaging.py runs pyright over it, with the installed package.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from jshard.models.llama import Llama, LlamaConfig


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = (
            nnx.Linear(256, 1024, rngs=rngs),
            nnx.Linear(1024, 256, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def make_model(rngs: nnx.Rngs) -> Model:
    return Model(rngs)


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jshard.Mean:
    error = jnp.square(model(batch["x"]) - batch["y"])
    return jshard.Mean(jnp.sum(error), error.size)


optimizer = optax.adamw(1e-3)
batch = {"x": np.ones((32, 256), np.float32), "y": np.zeros((32, 256), np.float32)}

fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(remat="dots"), units=(Block,))
state = fsdp.init(make_model, optimizer)
train_step = fsdp.train_step(loss_fn, optimizer)
state, metrics = train_step(state, fsdp.shard_batch(batch))
print(metrics["loss"], metrics["grad_norm"])

means = fsdp.eval_step(loss_fn)(state, fsdp.shard_batch(batch))
print(int(state.step), means.compute()["loss"], fsdp.policy.remat)
print(jax.tree.map(np.shape, fsdp.fetch(state.params)))

sizes = LlamaConfig(vocab_size=64, num_layers=1, num_heads=2, num_kv_heads=2, width=32)
llama: Llama = nnx.eval_shape(lambda: Llama(sizes, rngs=nnx.Rngs(0)))
print(sizes.num_heads, llama.config.width)
