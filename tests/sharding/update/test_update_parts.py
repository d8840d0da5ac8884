"""The parts of an update, each by its formula: averages, scales, clipping, shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.settings.state import LossScale
from jshard.sharding.update import ema
from jshard.sharding.update.skipping import loss_scale
from jshard.sharding.update.whole_layers import _dim


@pytest.mark.parametrize(
    ("decay", "steps", "kept"),
    [(0.999, 1, 2 / 11), (0.999, 8, 9 / 18), (0.3, 2, 0.25), (0.3, 3, 0.3)],
)
def test_an_average_keeps_what_tensorflow_does(decay, steps, kept):
    average, param = jnp.full(2, 8.0), jnp.full(2, -4.0, jnp.bfloat16)
    trees = ({"w": average, "n": jnp.int32(1)}, {"w": param, "n": jnp.int32(5)})
    got: Any = ema.update(*trees, decay, jnp.int32(steps))  # pyright: ignore
    np.testing.assert_allclose(got["w"], kept * 8 - (1 - kept) * 4, rtol=1e-6)
    assert got["w"].dtype == jnp.float32
    assert got["n"] == 5


@pytest.mark.parametrize(
    ("before", "finite", "after"),
    [
        ((8.0, 5, 2), True, (8.0, 6, 2)),
        ((8.0, 5, 2), False, (4.0, 0, 3)),
        ((8.0, 8, 2), True, (8.0, 9, 2)),
        ((8.0, 9, 2), True, (16.0, 0, 2)),
        ((8.0, 9, 2), False, (4.0, 0, 3)),
        ((2.0, 0, 0), False, (1.0, 0, 1)),
        ((1.0, 0, 0), False, (1.0, 0, 1)),
        ((2.0**24, 9, 0), True, (2.0**24, 0, 0)),
        ((2.0**23, 9, 0), True, (2.0**24, 0, 0)),
    ],
)
def test_a_scale_is_halved_or_doubled_and_steps_are_counted(before, finite, after):
    scale, good, skipped = before
    state = LossScale(jnp.float32(scale), *map(jnp.int32, (good, skipped, 0)))
    got = loss_scale.update(state, jnp.asarray(finite), window=10)
    assert (float(got.scale), int(got.good_steps), int(got.skipped)) == after


class TheirScale:
    """DeepSpeed's, but for an upper end, which its scale has not."""

    def __init__(self, scale: float, window: int, hysteresis: int):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left, self.iteration, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, 1)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.window == 0:
            self.left = self.hysteresis
            self.scale = min(2 * self.scale, 2.0**24)
        self.iteration += 1


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_scale_bears_as_many_overflows_as_deepspeeds(hysteresis):
    policy = jshard.Policy(loss_scale_start=16.0, loss_scale_hysteresis=hysteresis)
    update = jax.jit(loss_scale.update, static_argnums=(2, 3))
    ours, theirs = loss_scale.start(policy), TheirScale(16.0, 3, hysteresis)
    scales = []
    for overflow in np.random.default_rng(0).random(200) < 0.2:
        ours = update(ours, jnp.asarray(~overflow), 3, policy.loss_scale_hysteresis)
        theirs.update(overflow)
        assert float(ours.scale) == theirs.scale
        scales.append(theirs.scale)
    assert len({*scales}) > 5


def test_a_scale_starts_as_the_policy_says_by_default_at_2_to_the_15():
    policy = jshard.Policy()
    start = loss_scale.start(policy)
    assert (float(start.scale), int(start.good_steps), int(start.skipped)) == (
        2.0**15,
        0,
        0,
    )
    assert (loss_scale.LARGEST, policy.loss_scale_window) == (2.0**24, 2000)


@pytest.mark.core
def test_clipping_by_the_global_norm_is_exact_over_shards(x64):
    """Of parameters in parts of any mesh, padded ones included."""
    rng = np.random.default_rng(0)
    start = {"even": rng.normal(size=(16, 4)), "odd": rng.normal(size=(13, 3))}

    class Part(nnx.Module):
        def __init__(self, value: np.ndarray):
            self.value = nnx.Param(jnp.asarray(value))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.sum(self.value[...] ** 2) * x

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            for name, value in start.items():
                setattr(self, name, jshard.Unit(Part(value)))

    def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
        return jshard.Mean(jnp.sum(model.even(x) + model.odd(x)), x.size)

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), jshard.Policy(min_shard_elements=0))
    state = fsdp.init(Model, tx)
    x = np.linspace(0.5, 1.5, 16)
    state, metrics = fsdp.train_step(loss_fn, tx)(state, fsdp.shard_batch(x))
    grads = {name: 2 * value * x.mean() for name, value in start.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    after: Any = fsdp.fetch(state.params)
    for name, value in start.items():
        want = value - 0.5 / norm * grads[name]
        np.testing.assert_allclose(after[name]["value"].get_value(), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "shards", "least", "dim"),
    [
        ((8, 16), 4, 0, -2),
        ((6, 16), 4, 0, -1),  # what divides, before what would be padded
        ((5, 7), 4, 35, -1),
        ((5, 7), 4, 36, None),  # small, and so replicated
        ((3, 2), 4, 0, None),  # fewer numbers than devices along each dimension
        ((3, 4), 4, 0, -1),
        ((2, 5), 4, 0, -1),
        ((), 4, 0, None),
    ],
)
def test_a_layer_is_cut_where_a_parameter_would_be(shape, shards, least, dim):
    assert _dim(shape, shards, least) == dim
