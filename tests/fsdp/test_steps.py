"""What steps compute beyond training: predictions, on meshes whose layers are split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard

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


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "fsdp": 1}, {"tensor": 2, "context": 2, "fsdp": 2}], ids=str
)
def test_predictions_have_whole_sequences_and_whole_weights(sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh: Any = jshard.make_mesh(**sizes, devices=devices)
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    model = Model(nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(8, 4, WIDTH)).astype(np.float32)
    want = model(x)
    state = fsdp.from_model(model, optax.identity())
    predict = fsdp.predict_step(lambda model, x: model(x))
    got = fsdp.fetch(predict(state, fsdp.shard_examples(x)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
