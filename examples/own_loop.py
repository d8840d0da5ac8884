"""Your own model and loop: shard, train, evaluate, save, resume on another mesh.

    JAX_NUM_CPU_DEVICES=8 python examples/own_loop.py --steps=60
    JAX_NUM_CPU_DEVICES=8 python examples/own_loop.py --steps=120 --replica=2

The model is plain Flax: jshard is told the types of its layers, and nothing else. It
reads bytes of Python's `typing` module. docs/tutorials/shard_your_model.md explains it
part by part.
"""

import argparse
import functools
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard

WIDTH, LENGTH, BATCH, EVERY = 64, 64, 32, 20


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = jnp.sum(logits.argmax(-1) == targets)
    loss = jshard.Mean(jnp.sum(losses), losses.size)  # total and count on this device
    return loss, {"accuracy": jshard.Mean(right, losses.size)}


@functools.cache
def windows():
    """Returns every stretch of LENGTH + 1 bytes of the text."""
    text = np.frombuffer(Path(typing.__file__).read_bytes(), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1).astype(np.int32)


def batch_of(step):
    """Returns a batch that depends on the step alone; the last tenth is held out."""
    rng = np.random.default_rng(step)
    return windows()[rng.integers(0, len(windows()) * 9 // 10, BATCH)]


def held_out():
    last = windows()[len(windows()) * 9 // 10 + LENGTH :]
    return np.array_split(last[:: len(last) // 256][:256], 256 // BATCH)


def main(steps, replica, folder):
    mesh = jshard.make_mesh(replica=replica)
    fsdp = jshard.FSDP(mesh, jshard.Policy(remat="dots"), units=(Block, nnx.Embed))
    optimizer = jshard.optim.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train_step = fsdp.train_step(loss_fn, optimizer)
    eval_step = fsdp.eval_step(loss_fn)

    with jshard.Checkpointer(folder, keep=2) as checkpointer:
        if checkpointer.steps():
            state = checkpointer.restore(fsdp.abstract_state(Model, optimizer))
            print(f"restored step {int(state.step)} onto {dict(mesh.shape)}")
        else:
            state = fsdp.init(Model, optimizer)  # created as shards

        for step in range(int(state.step), steps):
            state, metrics = train_step(state, fsdp.shard_batch(batch_of(step)))
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                means = [eval_step(state, fsdp.shard_batch(b)) for b in held_out()]
                held = sum(means[1:], means[0]).compute()
                print(
                    f"step {step + 1}  loss {metrics['loss']:.4f}"
                    f"  held out {held['loss']:.4f}  accuracy {held['accuracy']:.3f}"
                )
                checkpointer.save(state)  # returns once the state may be donated

    kernel = state.params["blocks"][0]["up"]["kernel"]
    shard = kernel.get_value().addressable_shards[0].data.shape
    print(f"blocks[0].up.kernel: {kernel.shape}, {shard} on each device")
    print("whole, on the host:", fsdp.fetch(state.params)["head"]["kernel"].shape)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--replica", type=int, default=1, help="copies of the model")
    parser.add_argument("--folder", default="runs/own_loop", help="of checkpoints")
    options = parser.parse_args()
    main(options.steps, options.replica, options.folder)
