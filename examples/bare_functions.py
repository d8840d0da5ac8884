"""Functions of plain arrays, fully sharded: no Flax, only JAX and optax.

    JAX_NUM_CPU_DEVICES=8 python examples/bare_functions.py

A residual MLP that reads 16 bytes of Python's `typing` module and predicts the next.
`jshard.functional.gather` gathers what is used whole, and `scan_layers`, beside it, the
layers, one by one.
"""

import argparse
import functools
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jshard

LAYERS, WIDTH, HIDDEN, CONTEXT, BATCH = 4, 64, 256, 16, 256
AXES = ("replica", "fsdp")  # of every mesh that jshard makes


def init(key):
    keys = iter(jax.random.split(key, 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    return {
        "embed": normal(256, WIDTH // CONTEXT * 4),
        "mix": normal(WIDTH * 4, WIDTH),
        "layers": {
            "up": normal(LAYERS, WIDTH, HIDDEN),
            "down": normal(LAYERS, HIDDEN, WIDTH),
        },
    }


# All have a first dimension that eight devices divide; layers are not divided.
SPECS = {
    "embed": PartitionSpec("fsdp"),
    "mix": PartitionSpec("fsdp"),
    "layers": {
        "up": PartitionSpec(None, "fsdp"),
        "down": PartitionSpec(None, "fsdp"),
    },
}


def layer(params, x):
    h = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(h @ params["up"]) @ params["down"]


def loss(params, batch):
    """The loss of one device's examples, from its shards."""
    outer = {key: params[key] for key in ("embed", "mix")}
    outer = jshard.functional.gather(outer, {key: SPECS[key] for key in outer})
    x = outer["embed"][batch[:, :-1]].reshape(len(batch), -1) @ outer["mix"]
    x = jshard.functional.scan_layers(layer, params["layers"], x, specs=SPECS["layers"])
    logits = x @ outer["mix"].T @ jnp.tile(outer["embed"], CONTEXT).T
    targets = batch[:, -1].astype(int)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses) / BATCH  # of the global batch: gradients are summed


def value_and_grad(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.lax.psum(value, AXES), grads


def main(steps):
    mesh, optimizer = jshard.make_mesh(), optax.adam(3e-3)
    local = jax.shard_map(
        value_and_grad,
        mesh=mesh,
        in_specs=(SPECS, PartitionSpec(AXES)),
        out_specs=(PartitionSpec(), SPECS),
        check_vma=False,  # gather and scan_layers write the sums out
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @jshard.functional.in_order  # CPUs need it; GPUs do not mind
    def step(params, opt_state, batch):
        value, grads = local(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    opt_state = optimizer.init(params)
    text = np.frombuffer(Path(typing.__file__).read_bytes(), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    rng = np.random.default_rng(0)
    for i in range(steps):
        batch = windows[rng.integers(0, len(windows), BATCH)]
        params, opt_state, value = step(params, opt_state, batch)
        if i % 10 == 0 or i == steps - 1:  # more than 32 steps in flight may hang a CPU
            print(f"step {i}: loss {float(value):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
