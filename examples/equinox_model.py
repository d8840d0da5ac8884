"""An Equinox model, fully sharded.

    pip install 'jshard[examples]'
    JAX_NUM_CPU_DEVICES=8 python examples/equinox_model.py

The model is a pytree: `eqx.partition` takes its arrays out, `jshard.functional` gathers
their shards (`gather`, `scan_layers`), and `eqx.combine` puts full weights in again.
It classifies the handwritten digits 0 and 1, which it draws itself, badly.
"""

import argparse
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jshard

LAYERS, SIDE, WIDTH, BATCH = 4, 16, 64, 128
AXES = ("replica", "fsdp")  # of every mesh that jshard makes


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


class Classifier(eqx.Module):
    embed: eqx.nn.Linear
    blocks: Block  # stacked: each array has a leading dimension of layers
    head: eqx.nn.Linear

    def __init__(self, key):
        first, middle, last = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(SIDE * SIDE, WIDTH, key=first)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(middle, LAYERS))
        self.head = eqx.nn.Linear(WIDTH, 2, key=last)


def specs_of(params, devices):
    """Shards the first dimension that the devices divide, but that of layers."""

    def spec(path, x):
        first = 1 if path[0].name == "blocks" else 0
        for dim in range(first, x.ndim):
            if x.shape[dim] % devices == 0:
                return PartitionSpec(*[None] * dim, "fsdp")
        return PartitionSpec()

    return jax.tree.map_with_path(spec, params)


def draw(rng):
    """Rings, which are zeros, and strokes, which are ones."""
    labels = rng.integers(0, 2, BATCH)
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    dy, dx, size = rng.uniform(
        [[-0.3], [-0.3], [0.4]], [[0.3], [0.3], [0.7]], (3, BATCH)
    )
    y, x = y[None] - dy[:, None, None], x[None] - dx[:, None, None]
    size = size[:, None, None]
    ring = np.abs(np.hypot(y, x) - size) < 0.2
    stroke = (np.abs(x) < 0.2) & (np.abs(y) < size)
    images = np.where(labels[:, None, None] == 1, stroke, ring)
    images = images + rng.normal(size=images.shape)  # noise as strong as the ink
    return {"images": images.reshape(BATCH, -1).astype(np.float32), "labels": labels}


def main(steps):
    mesh, optimizer = jshard.make_mesh(), optax.adam(1e-3)
    model = eqx.filter_eval_shape(Classifier, jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    specs = specs_of(params, mesh.shape["fsdp"])

    def loss(params, batch):
        """The loss of one device's examples, from its shards."""
        whole = lambda part: eqx.combine(
            jshard.functional.gather(getattr(params, part), getattr(specs, part)),
            getattr(static, part),
        )
        layer = lambda p, x: jax.vmap(eqx.combine(p, static.blocks))(x)
        x = jax.vmap(whole("embed"))(batch["images"])
        x = jshard.functional.scan_layers(layer, params.blocks, x, specs=specs.blocks)
        logits, labels = jax.vmap(whole("head"))(x), batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = jnp.sum(jnp.argmax(logits, axis=-1) == labels) / BATCH
        return jnp.sum(losses) / BATCH, right  # of the global batch

    def value_and_grad(params, batch):
        values, grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.lax.psum(values, AXES), grads

    local = jax.shard_map(
        value_and_grad,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(AXES)),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,  # gather and scan_layers write the sums out
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @jshard.functional.in_order  # CPUs need it; GPUs do not mind
    def step(params, opt_state, batch):
        values, grads = local(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, values

    make = lambda key: eqx.filter(Classifier(key), eqx.is_array)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(make, out_shardings=shardings)(jax.random.key(0))
    opt_state, rng = optimizer.init(params), np.random.default_rng(0)
    for i in range(steps):
        params, opt_state, (value, right) = step(params, opt_state, draw(rng))
        if i % 10 == 0 or i == steps - 1:  # more than 32 steps in flight may hang a CPU
            print(f"step {i}: loss {float(value):.3f}, {float(right):.0%} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
