"""A Linen transformer as it is, trained fully sharded, saved and exported.

    JAX_NUM_CPU_DEVICES=8 python examples/linen_transformer.py --folder=runs/linen

`jshard.linen.Model` holds the parameters of the module; the types in `units` gather
theirs when they are called. Started again, it goes on from its newest checkpoint.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jshard
from jshard.data.text.text_data import text_data
from jshard.export import export

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 256, 64, 64, 4, 3, 32


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        attention = linen.MultiHeadDotProductAttention(HEADS, deterministic=True)
        x = x + attention(linen.LayerNorm()(x), mask=mask)
        h = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH)(h), None


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCABULARY, WIDTH)
        init = linen.initializers.normal(0.02)
        x = embed(tokens) + self.param("position", init, (LENGTH, WIDTH))
        blocks = linen.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=LAYERS,
        )
        x, _ = blocks()(x, linen.make_causal_mask(tokens))
        return linen.Dense(VOCABULARY)(linen.LayerNorm()(x))


def make_model(rngs):
    tokens = jnp.zeros((1, LENGTH), int)
    units = (linen.Embed, Block)
    return jshard.linen.Model(Transformer(), tokens, units=units, rngs=rngs)


def mean_loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jshard.Mean(jnp.sum(losses), losses.size)


def loss_fn(model, batch):
    return mean_loss(model(batch["inputs"]), batch)


def main(folder, steps):
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh()), optax.adamw(3e-3)
    train_step = fsdp.train_step(loss_fn, optimizer)
    batches = text_data("", "train", sequence_length=LENGTH, seed=0).batch(BATCH)
    with jshard.Checkpointer(folder / "checkpoints", keep=2) as checkpointer:
        if checkpointer.steps():
            abstract = fsdp.abstract_state(make_model, optimizer)
            state = checkpointer.restore(abstract)
        else:
            state = fsdp.init(make_model, optimizer)
        for i in range(int(state.step), steps):
            state, metrics = train_step(state, fsdp.shard_batch(batches[i]))
            if i % 25 == 0 or i == steps - 1:
                print(f"step {i}: loss {float(metrics['loss']):.3f}")
            if (i + 1) % 100 == 0 or i == steps - 1:
                checkpointer.save(state)

    # Linen's own tree again, on the host: Linen alone computes the same.
    variables = nnx.to_pure_dict(fsdp.fetch(state.params))
    batch = batches[steps]
    alone = mean_loss(Transformer().apply(variables, batch["inputs"]), batch).compute()
    loss = fsdp.eval_step(loss_fn)(state, fsdp.shard_batch(batch)).compute()["loss"]
    print(f"loss of the next batch: {loss:.4f}, with Linen alone {float(alone):.4f}")
    np.testing.assert_allclose(loss, alone, rtol=1e-4)
    if not (folder / "export").exists():
        export(folder / "checkpoints", folder / "export")
    print(f"weights: {folder / 'export'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/linen"))
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
