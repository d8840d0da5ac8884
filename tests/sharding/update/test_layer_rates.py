"""Learning rates by layer of a Stack, as docs/how_to/freeze.md sets them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled

pytestmark = pytest.mark.usefixtures("x64")

WIDTH = 12  # of 8 devices it needs padding
RATES = (0.25, 0.5, 1.0)
X = np.random.default_rng(0).normal(size=(24, WIDTH))
Y = np.sin(3 * X)
CHAINS = {
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.1),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
}


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = jshard.Stack(linear, len(RATES), rngs=rngs)
        self.head = jshard.Unit(linear(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.blocks(x)))


def loss_fn(model: Model, batch: Any) -> jshard.Mean:
    error = jnp.square(model(batch["x"]) - batch["y"])
    return jshard.Mean(jnp.sum(error), error.size)


def by_layer(path: tuple, update: Any) -> Any:
    if path[0] != "blocks":
        return update
    value = update.get_value()
    rates = np.array(RATES)
    return update.replace(value * rates.reshape(-1, *[1] * (value.ndim - 1)))


LAYER_RATES = optax.stateless(lambda updates, params: nnx.map_state(by_layer, updates))


def unstacked(params: Any) -> dict[str, Any]:
    tree = nnx.to_pure_dict(params)
    row = lambda i: jax.tree.map(
        lambda value: jnp.asarray(np.asarray(value)[i]), tree["blocks"]
    )
    layers = {f"{i}": row(i) for i in range(len(RATES))}
    return layers | {"head": jax.tree.map(jnp.asarray, tree["head"])}


def plain_run(params: dict[str, Any], make: Any) -> dict[str, Any]:
    """Five steps on one device, without jshard: one optimizer for each layer."""
    rates = {f"{i}": rate for i, rate in enumerate(RATES)} | {"head": 1.0}
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.multi_transform(
            {name: make(1e-2 * rate) for name, rate in rates.items()},
            {name: name for name in rates},
        ),
    )

    def loss(params: dict[str, Any]) -> jax.Array:
        h = jnp.asarray(X)
        for i in range(len(RATES)):
            h = h @ params[f"{i}"]["kernel"] + params[f"{i}"]["bias"]
        h = jnp.tanh(h) @ params["head"]["kernel"] + params["head"]["bias"]
        return jnp.mean(jnp.square(h - Y))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for _ in range(5):
        params, state = step(params, state)
    return params


@pytest.mark.quick("momentum-8")
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", CHAINS)
def test_scaled_rows_are_an_optimizer_for_each_layer(name, devices):
    make = CHAINS[name]
    tx = optax.chain(optax.clip_by_global_norm(0.5), make(1e-2), LAYER_RATES)
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), tx)
    want = plain_run(unstacked(fsdp.fetch(state.params)), make)
    step = fsdp.train_step(loss_fn, tx)
    for _ in range(5):
        state, _ = step(state, fsdp.shard_batch({"x": X, "y": Y}))
    got = unstacked(fsdp.fetch(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)
