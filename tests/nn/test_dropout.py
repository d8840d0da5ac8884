"""Plain random streams: each device and micro-batch draws for its own examples."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled

EXAMPLES, WIDTH, STEPS, PLACES = 8, 4, 3, 4
BATCH = {
    "x": np.ones((EXAMPLES, WIDTH), np.float32),
    "is": np.eye(EXAMPLES, dtype=np.float32),  # which example a row is
}


class Stream(nnx.Module):
    """A stream of NNX's."""

    def __init__(self, rngs: nnx.Rngs):
        self.noise = rngs.noise.fork()

    def draw(self) -> jax.Array:
        return jax.random.uniform(self.noise())


class Constant(nnx.Module):
    """A key in a Variable, as authors of their own noise write it."""

    def __init__(self, rngs: nnx.Rngs):
        self.key = nnx.Variable(rngs.noise())

    def draw(self) -> jax.Array:
        return jax.random.uniform(self.key[...])


class Split(Constant):
    """A key that the layer replaces whenever it draws."""

    def draw(self) -> jax.Array:
        self.key[...], key = jax.random.split(self.key[...])
        return jax.random.uniform(key)


class Bare(Constant):
    """A key in an attribute."""

    def __init__(self, rngs: nnx.Rngs):
        self.key = nnx.data(rngs.noise())

    def draw(self) -> jax.Array:
        return jax.random.uniform(self.key)


class Integers(Split):
    """A key as JAX made it before it had a dtype of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.key = nnx.Variable(jax.random.key_data(rngs.noise()))


class Noisy(nnx.Module):
    """Adds the same noise to all examples of a device; returns the noise of each."""

    def __init__(self, kind: type, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.source = kind(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = self.source.draw()
        return self.linear(x) + noise, jnp.full(len(x), noise)


class Shown(nnx.Module):
    """Has the noise as its gradient: a number for each place and example."""

    def __init__(self):
        self.factors = nnx.Param(jnp.zeros((PLACES, EXAMPLES)))

    def __call__(self, noise: jax.Array) -> jax.Array:
        return jnp.sum(self.factors * noise)


class Model(nnx.Module):
    """Noise in a Stack, a Unit and the root."""

    def __init__(self, kind: type, rngs: nnx.Rngs):
        self.stack = jshard.Stack(lambda r: Noisy(kind, r), 2, rngs=rngs)
        self.unit = jshard.Unit(Noisy(kind, rngs))
        self.root = Noisy(kind, rngs)
        self.shown = jshard.Unit(Shown())

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, stacked = self.stack(x)
        x, of_unit = self.unit(x)
        x, of_root = self.root(x)
        return x, jnp.stack([*stacked, of_unit, of_root])


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> Any:
    x, noise = model(batch["x"])
    shown = model.shown(noise @ batch["is"])
    return jshard.Mean(jnp.sum(x**2) + shown, len(x))


@functools.cache
def noise_of(kind: type, **knobs: Any) -> np.ndarray:
    """The noise of a run on a hybrid mesh, (steps, places, examples)."""
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2, devices=jax.devices()[:4]), policy)
    optimizer = optax.chain(optax.trace(0.0), optax.scale(0.0))  # keeps gradients
    make = lambda: Model(kind, nnx.Rngs(0))
    state = fsdp.from_model(make() if kind is Bare else filled(make), optimizer)
    step = fsdp.train_step(loss_fn, optimizer)
    batch, seen = fsdp.shard_batch(BATCH), []
    for _ in range(STEPS):
        state, _ = step(state, batch)
        gradient = fsdp.fetch(state.opt_state[0].trace["shown"]["factors"].get_value())
        seen.append(EXAMPLES * np.asarray(gradient))
    found = np.array(seen)
    assert np.all((found > 0) & (found < 1)), "not what was drawn"
    return found


# A split key is stored as tests/nn/test_dropout_masks.py says, by default.
@pytest.mark.slow  # test_determinism.py has a mask for each place
@pytest.mark.parametrize("kind", [Stream, Constant, Split, Bare])
def test_each_device_and_micro_batch_draws_noise_of_its_own(kind):
    noise = noise_of(kind, accumulate=2)  # an example each
    for place in range(PLACES):
        steps = noise[:, place] if kind in (Stream, Split) else noise[:1, place]
        assert len(np.unique(steps)) == steps.size


def test_a_key_that_is_never_replaced_draws_the_same_in_every_step():
    noise = noise_of(Constant, accumulate=2)  # an example each
    np.testing.assert_array_equal(noise[1:], noise[:-1])
    assert len(np.unique(noise[0])) == noise[0].size


def test_a_key_as_integers_is_refused_where_devices_would_draw_alike():
    def trace(kind: type, number: int, **knobs: Any) -> None:
        mesh = jshard.make_mesh(devices=jax.devices()[:number])
        fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0, **knobs))
        state = fsdp.abstract_state(lambda r: Model(kind, r), optax.sgd(1.0))
        batch = fsdp.shard_batch(BATCH)
        fsdp.train_step(loss_fn, optax.sgd(1.0)).trace(state, batch)

    message = r"'(stack.source|root.source|unit.source).key' is .*jax.random.key"
    for number, accumulate in ((2, 1), (1, 2)):
        with pytest.raises(jshard.UserError, match=message):
            trace(Integers, number, accumulate=accumulate)
    trace(Integers, 1)
