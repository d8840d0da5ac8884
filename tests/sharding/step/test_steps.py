"""Steps beside training on batches: predictions, and how often a step is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled

WIDTH = 8


class Mlp(nnx.Module):
    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 12, rngs=rngs)
        self.down = nnx.Linear(12, WIDTH, bias_init=nnx.initializers.ones, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mlp = lambda x: self.down(jnp.tanh(self.up(x)))
        return x + jshard.nn.tensor_parallel(mlp, x)


class Model(nnx.Module):
    splits_sequences = True

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = jshard.Unit(Mlp(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        positions = jshard.nn.positions(x.shape[1])
        return self.mlp(x + positions[:, None])


@pytest.mark.quick("{'tensor': 2, 'context': 2")
@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "fsdp": 1}, {"tensor": 2, "context": 2, "fsdp": 2}], ids=str
)
def test_predictions_have_whole_sequences_and_whole_weights(sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh: Any = jshard.make_mesh(**sizes, devices=devices)
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    model = filled(lambda: Model(nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(8, 4, WIDTH)).astype(np.float32)
    want = jax.jit(lambda x: model(x))(x)
    state = fsdp.from_model(model, optax.identity())
    predict = fsdp.predict_step(lambda model, x: model(x))
    got = fsdp.fetch(predict(state, fsdp.shard_examples(x)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("from_model")
@pytest.mark.parametrize("method", ["init", "from_model"])
def test_a_step_is_traced_once_whatever_a_parameter_was_filled_with(method):
    """After a step no type is weak; before it, that of ``jnp.full(size, 0.5)`` was."""

    class Filled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.scale = nnx.Param(jnp.full(8, 0.5))
            self.calls = nnx.BatchStat(jnp.full((), 0.0))

        def __call__(self, x: jax.Array) -> jax.Array:
            traced.append(x.shape)
            self.calls[...] += 1
            return x * self.scale[...]

    def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
        return jshard.Mean(jnp.sum(model(x) ** 2), x.size)

    traced: list[tuple[int, ...]] = []
    fsdp, tx = jshard.FSDP(jshard.make_mesh(), units=(Filled,)), optax.adam(1e-2)
    make = lambda rngs: nnx.Sequential(Filled(rngs))
    made = make if method == "init" else make(nnx.Rngs(0))
    state: Any = getattr(fsdp, method)(made, tx)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    step, x = fsdp.train_step(loss_fn, tx), np.ones((8, 8), np.float32)
    for _ in range(2):
        state, _ = step(state, fsdp.shard_batch(x))
    assert len(traced) == 1


@pytest.mark.quick("3")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_counts_the_draws_of_one_micro_batch(accumulate):
    """The next step draws other masks, however many micro-batches a step has."""

    class Dropped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(self.dropout(x))

    def loss_fn(model: Dropped, x: jax.Array) -> jshard.Mean:
        losses = model(x) ** 2
        return jshard.Mean(jnp.sum(losses), losses.size)

    fsdp = jshard.FSDP(
        jshard.make_mesh(devices=jax.devices()[:2]),
        jshard.Policy(accumulate=accumulate),
    )
    optimizer = optax.sgd(0.1)
    state = fsdp.from_model(filled(lambda: Dropped(nnx.Rngs(0))), optimizer)
    step = fsdp.train_step(loss_fn, optimizer)
    batch = fsdp.shard_batch(np.ones((6, WIDTH), np.float32))
    for count in (1, 2):
        state, _ = step(state, batch)
        (drawn,) = (
            variable.get_value()
            for path, variable in nnx.to_flat_state(nnx.state(fsdp.model(state)))
            if isinstance(variable, nnx.RngCount) and "dropout" in path
        )
        assert drawn == count
