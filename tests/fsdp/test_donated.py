"""A state that was donated to a step is refused in one line wherever it is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from parity import make_mesh
from zoo_layers import Dense

TX = optax.adam(1e-3)
BATCH = np.ones((16, 8), np.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = jshard.Unit(Dense(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def loss_fn(model: Model, x: jax.Array) -> jshard.Mean:
    y = model(x)
    return jshard.Mean(jnp.sum(y**2), y.size)


def save(fsdp: jshard.FSDP, state: Any, folder: Any) -> None:
    with jshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(state)


READERS = {
    "train_step": lambda fsdp, state, _: fsdp.train_step(loss_fn, TX)(state, BATCH),
    "eval_step": lambda fsdp, state, _: fsdp.eval_step(loss_fn)(state, BATCH),
    "predict_step": lambda fsdp, state, _: fsdp.predict_step(Model.__call__)(
        state, BATCH
    ),
    "model": lambda fsdp, state, _: fsdp.model(state),
    "fetch": lambda fsdp, state, _: fsdp.fetch(state.params),
    "save": save,
}


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_that_was_donated_is_refused_in_one_line(devices, tmp_path):
    fsdp = jshard.FSDP(make_mesh(1, devices), jshard.Policy(min_shard_elements=0))
    donated = fsdp.init(Model, TX)
    step = fsdp.train_step(loss_fn, TX)
    state, _ = step(donated, BATCH)
    readers = {"the same step": lambda *_: step(donated, BATCH)} | READERS
    for name, read in readers.items():
        with pytest.raises(
            jshard.UserError, match="go on with the state that"
        ) as error:
            read(fsdp, donated, tmp_path / name)
        assert "\n" not in str(error.value), name
    state, _ = step(state, BATCH)  # the one that was returned is fine
    assert int(state.step) == 2


def test_what_is_no_state_is_refused_in_one_line():
    fsdp = jshard.FSDP(make_mesh(1, 2))
    with pytest.raises(jshard.UserError, match=r"state of fsdp\.init, not a Model$"):
        fsdp.train_step(loss_fn, TX)(Model(nnx.Rngs(0)), BATCH)  # pyright: ignore[reportArgumentType]
